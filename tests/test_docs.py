"""Every page: links lead to a file and to a heading that exist, and files that it names are there."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = ("docs", "paper_figures", "results")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")) if "runs" not in path.parts),
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:conf|harness|strategies|kernels|tests|docs|results|benchmarks|paper_figures)/[\w./-]+\w)`")


RESULTS = [path for path in sorted((ROOT / "results" / "reference").rglob("*")) if path.is_file()]
OWN_PLACE = re.compile(rb"(?<![\w.~:/-])/(?:home|media|mnt|opt|private|root|scratch|tmp|Users|var|work)/[^\s\"']*")


def without_code(text: str) -> str:
    """Blocks and spans of code have brackets of their own."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A heading, with words\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](gone.md) [c](other.md#a-heading-with-words) [d](other.md#no) `[e](x)` [f](#no)")
    assert broken_links(page) == ["gone.md", "other.md#no", "#no"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_it_exist(page):
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if "layerwise" not in name and not (ROOT / name).exists()] == []


def unknown_modules(text: str, known: set[str]) -> list[str]:
    """List the files of Python that a text names without a folder and that are not among the known names."""
    return [name for name in re.findall(r"`(\w+\.py)`", text) if name not in known]


def test_modules_named_without_their_folder_exist():
    folders = ("harness", "strategies", "kernels", "tests", "benchmarks", "paper_figures")
    known = {path.name for path in ROOT.glob("*.py")}
    known |= {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert unknown_modules("`queues.py`, `gone.py`, `harness/gone.py`, gone.py", known) == ["gone.py"]
    assert unknown_modules((ROOT / "docs/architecture.md").read_text(encoding="utf-8"), known) == []


def test_the_life_of_a_request_has_eight_steps_and_every_step_its_files():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## The life of a request\n")[1].split("\n## ")[0]
    steps = re.split(r"^(\d)\. ", section, flags=re.MULTILINE)[1:]
    assert steps[::2] == [str(number) for number in range(1, 9)]
    for text in steps[1::2]:
        files = [name for name in NAMED.findall(text) if name.endswith(".py")]
        assert files and all((ROOT / name).is_file() for name in files), text


def own_places(path: Path) -> set[bytes]:
    """Return the absolute paths in a file that are good on one computer only."""
    content = path.read_bytes()
    return set(OWN_PLACE.findall(gzip.decompress(content) if path.suffix == ".gz" else content))


def test_results_and_pages_name_no_place_on_somebodys_computer():
    """Pictures hold none that one could tell from noise."""
    files = [*PAGES, *(path for path in RESULTS if path.suffix != ".png")]
    assert {str(path.relative_to(ROOT)): found for path in files if (found := own_places(path))} == {}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_a_place_on_somebodys_computer_is_found(name, tmp_path):
    text = b'{"model": "/home/me/models/x", "path": "see https://a.b/tmp/c and docs/var/d; ~/tmp/e", "at /tmp/f,": 1}'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert own_places(tmp_path / name) == {b"/home/me/models/x", b"/tmp/f,"}
