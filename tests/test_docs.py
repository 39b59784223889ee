"""Every page: links lead to a file and to a heading that exist, commands are ones that can be given."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.settings import load_strategy, parse_settings
from tests.composing import composed
from tests.conftest import ROOT

FOLDERS = ("docs", "paper_figures", "results")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")) if "runs" not in path.parts),
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
OWN_SETTINGS = {"harness.plan": ("simulate", "max_simulated_ops"), "harness.hardware.calibrate": ("out",)}


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


def commands(page: Path) -> list[str]:
    """Lines of code that run something of ours, joined where they go on in the next line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    |\$ )?(python (?:run\.py|-m) .*)$", text, re.MULTILINE)
    return [re.split(r"\s#\s", line)[0].strip() for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A heading, with words\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](gone.md) [c](other.md#a-heading-with-words) [d](other.md#no) `[e](x)` [f](#no)")
    assert broken_links(page) == ["gone.md", "other.md#no", "#no"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_valid(page):
    """Modules exist; what follows run.py and the planning commands is a configuration, where it is spelled out."""
    for command in commands(page):
        words = shlex.split(command)[1:]
        if words[0] == "-m":
            assert find_spec(words[1]) is not None, command
        configured = words[0] == "run.py" or words[1] in OWN_SETTINGS
        if not configured or any(mark in command for mark in ("-m strategy", "<", "NAME", "FOLDER", " -m ", "...")):
            continue
        own = OWN_SETTINGS.get(words[1] if words[0] == "-m" else "", ())
        overrides = [w for w in words[2 if words[0] == "-m" else 1 :] if w.partition("=")[0] not in own]
        load_strategy(parse_settings(composed(*overrides)).strategy)
