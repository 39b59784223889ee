"""Text is divided so that nothing that is held out is trained on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.training.texts import Document, Domain, read_domains
from harness.training.tokens import TokenStreams, held_out_windows

WHOLE = 10**9


def written(folder, name: str, rows: list[dict[str, object]]) -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def keys(documents: list[Document]) -> set[str]:
    return {" ".join(each.text.split()) for each in documents}


def require_apart(domains: list[Domain]) -> None:
    held_out = set().union(*(keys(domain.held_out) for domain in domains))
    training = [key for domain in domains for key in keys(domain.training)]
    assert not held_out & set(training)
    assert len(training) == len(set(training)), "a document of two domains is trained on in one"


@given(
    first=st.lists(st.integers(0, 30), min_size=3, max_size=40),
    second=st.lists(st.integers(20, 50), min_size=3, max_size=40),
    seed=st.integers(0, 100),
    share=st.sampled_from([0.05, 0.3, 0.5]),
)
def test_no_document_is_on_both_sides(tmp_path_factory, first, second, seed, share):
    """Though documents come twice, in one domain and in both, with other white space."""
    folder = tmp_path_factory.mktemp("texts")
    one = written(folder, "one.jsonl", [{"text": f"document  {n}\n"} for n in (*first, 100, 101)])
    two = written(folder, "two.jsonl", [{"text": f"document {n}"} for n in (*second, 200, 201)])
    domains, _ = read_domains([one, two], [], share=share, max_bytes=WHOLE, seed=seed)
    require_apart(domains)
    everything = set().union(*(keys(each.training) | keys(each.held_out) for each in domains))
    assert everything == {f"document {n}" for n in (*first, *second, 100, 101, 200, 201)}
    again, _ = read_domains([one, two], [], share=share, max_bytes=WHOLE, seed=seed)
    assert again == domains


def test_named_held_out_files_are_never_trained_on(tmp_path):
    train = written(tmp_path, "train.jsonl", [{"question": f"Q{n}", "answer": f"A{n}"} for n in range(20)])
    test = written(tmp_path, "test.jsonl", [{"question": f"Q{n}", "answer": f"A{n}"} for n in range(15, 30)])
    (domain,), sources = read_domains([f"m:{train}"], [f"m:{test}"], share=0.5, max_bytes=WHOLE, seed=0)
    require_apart([domain])
    assert len(domain.training) == 15 and len(domain.held_out) == 15
    assert [(source.name, source.held_out) for source in sources] == [("train.jsonl", False), ("test.jsonl", True)]


def test_the_seed_chooses_what_is_held_out(tmp_path):
    path = written(tmp_path, "a.jsonl", [{"text": f"document {n}"} for n in range(100)])
    found = [read_domains([path], [], share=0.2, max_bytes=WHOLE, seed=seed)[0][0].held_out for seed in range(3)]
    assert len({frozenset(keys(each)) for each in found}) == 3


def test_rows_of_known_formats_become_prompt_and_continuation(tmp_path):
    rows: list[dict[str, object]] = [
        {"question": "How many?", "answer": "Three."},
        {"task_id": "x/1", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "test": "assert f() == 1"},
        {"instruction": "Say so.", "instances": [{"input": "", "output": "So."}, {"input": "a", "output": "b"}]},
        {"title": "One", "parts": ["two", {"deep": "three"}], "number": 4},
    ]
    path = written(tmp_path, "all.jsonl", [*rows, {"text": "held out"}])
    (domain,), _ = read_domains([path], [], share=0.0, max_bytes=WHOLE, seed=0)
    documents = [*domain.training, *domain.held_out]
    found = {each.text[: each.prompt_chars]: each.text[each.prompt_chars :] for each in documents}
    assert found["How many?\n"] == "Three."
    assert found["def f():\n"] == "    return 1\n"
    assert found["Say so.\n"] == "So.\na\nb"
    assert len(found) == 5 and "One\ntwo\nthree" in {each.text for each in documents}


def test_folders_are_read_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "folder.md").mkdir()  # no file, though its name looks like one
    (tmp_path / "folder.md" / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.py").write_text("x = 1")
    (domain,), _ = read_domains([f"all:{tmp_path}"], [], share=0.0, max_bytes=WHOLE, seed=0)
    assert {each.text for each in (*domain.training, *domain.held_out)} == {"one\n\ntwo", "x = 1"}
    (tmp_path / "b.py").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match=r"^text: b.py is not UTF-8 text"):
        read_domains([f"all:{tmp_path}"], [], share=0.0, max_bytes=WHOLE, seed=0)


def test_every_machine_has_text_to_train_on():
    domains, sources = read_domains(
        ["code:python", "documentation:python-docs"], [], share=0.05, max_bytes=300_000, seed=0
    )
    require_apart(domains)
    assert all(sum(len(each.text) for each in domain.training) > 200_000 for domain in domains)
    assert [source.name for source in sources] == ["python", "python-docs"]


def test_limits_count_bytes_whatever_the_script(tmp_path):
    """A Greek letter has two bytes: as many characters of it are twice the megabytes."""
    for name, letter in (("greek", "\u03b1"), ("latin", "a")):
        rows = (json.dumps({"text": f"{letter * 90}{number:010d}"}) for number in range(100))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    paths = [str(tmp_path / "greek.jsonl"), str(tmp_path / "latin.jsonl")]
    domains, _ = read_domains(paths, [], share=0.0, max_bytes=1_900, seed=0)
    sizes = {domain.name: len(domain.training) + len(domain.held_out) for domain in domains}
    assert sizes == {"greek": 10, "latin": 19}


def test_held_out_windows_are_of_all_held_out_text():
    """No two overlap, and the first and the last token are among them."""
    stream = TokenStreams("numbers", np.arange(0), np.arange(1000))
    windows = held_out_windows(stream, 5, 31)
    assert windows.shape == (5, 32) and (windows.diff(dim=1) == 1).all()
    starts = windows[:, 0].tolist()
    assert starts[0] == 0 and windows[-1, -1] == 999
    assert min(np.diff(starts)) > 200
    assert held_out_windows(stream, 100, 99).flatten().tolist() == list(range(1000)), "all of it, where it is short"
