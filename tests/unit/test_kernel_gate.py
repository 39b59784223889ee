"""The gate of the kernels' benchmarks: which ratios it compares, what it forgives, and its exit codes."""

from __future__ import annotations

import json

import pytest

from benchmarks import gate
from benchmarks.report_kernels import OUT, PARTS
from benchmarks.support import tables
from benchmarks.support.computer import processor_model

MACHINE = {"processor": "Some Processor(R)", "processor_model": "6.143.8", "isa": "avx2"}
REFERENCE = {("test_a", "copy ceiling"): 0.8, ("test_a", "torch"): 2.0, ("test_gone", "torch"): 1.0}


def rows_of(ratios, **entries):
    tests: dict[str, dict[str, float]] = {}
    for (test, contestant), value in ratios.items():
        tests.setdefault(test, {})[contestant] = value
    return [{"test": test, "ratio": ratio, **entries} for test, ratio in tests.items()]


@pytest.fixture
def measured(monkeypatch):
    """Lets measurements be a list of what comes in turn, and notes how often was measured."""
    turns: list[dict] = []
    asked: list[str] = []

    def measure(part, arguments):
        asked.append(part)
        return {"rows": rows_of(turns[min(len(asked), len(turns)) - 1])}

    monkeypatch.setattr(gate, "measure", measure)
    monkeypatch.setattr(gate, "machine_facts", lambda: MACHINE)
    return turns, asked


@pytest.fixture
def reference(tmp_path):
    folder = tmp_path / "some-processor-6.143.8-avx2"
    folder.mkdir()
    (folder / "linear.json").write_text(json.dumps({"rows": rows_of(REFERENCE)}))
    return tmp_path


def run(reference, *more):
    return gate.main(["--only", "linear", "--reference", str(reference), *more])


def test_as_fast_as_the_reference_passes_at_once(measured, reference, capsys):
    turns, asked = measured
    turns.append({("test_a", "copy ceiling"): 0.73, ("test_a", "torch"): 2.5, ("test_new", "torch"): 0.01})
    assert run(reference) == 0
    assert len(asked) == 1 and "test_new" not in capsys.readouterr().out


def test_a_slower_kernel_fails_after_a_second_look(measured, reference, capsys):
    turns, asked = measured
    turns.append({("test_a", "copy ceiling"): 0.71, ("test_a", "torch"): 2.0})
    assert run(reference) == 1
    assert len(asked) == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "**below**" in line]
    assert "test_a" in line and "copy ceiling" in line and "0.89" in line
    assert run(reference, "--least", "0.8") == 0


def test_a_disturbed_run_is_forgiven_by_the_second(measured, reference):
    turns, asked = measured
    turns += [{("test_a", "copy ceiling"): 0.1, ("test_a", "torch"): 2.0}, {("test_a", "copy ceiling"): 0.8}]
    assert run(reference) == 0
    assert len(asked) == 2


def test_an_unknown_processor_is_told_and_passes(measured, reference, monkeypatch, capsys):
    monkeypatch.setattr(gate, "machine_facts", lambda: MACHINE | {"isa": "amx"})
    assert run(reference) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "SKIPPED: no reference for some-processor-6.143.8-amx (there are some-processor-6.143.8-avx2)"
    )
    assert not measured[1]


@pytest.mark.parametrize("model", ["6.143.7", None])
def test_another_model_of_the_same_name_has_no_reference(measured, reference, monkeypatch, capsys, model):
    monkeypatch.setattr(gate, "machine_facts", lambda: MACHINE | {"processor_model": model})
    assert run(reference) == 0
    assert capsys.readouterr().out.startswith("SKIPPED: no reference for some-processor") and not measured[1]


@pytest.mark.parametrize(("kind", "now_gb_s", "code"), [("read", 30.1, 0), ("copy", 19.1, 0), ("read", 29.9, 1)])
def test_a_row_under_another_ceiling_is_skipped_visibly(monkeypatch, reference, capsys, kind, now_gb_s, code):
    key = f"{kind}_ceiling_gb_s"
    slow = rows_of({("test_a", "torch"): 0.5}, **{key: now_gb_s})
    monkeypatch.setattr(gate, "machine_facts", lambda: MACHINE)
    monkeypatch.setattr(gate, "measure", lambda part, arguments: {"rows": slow})
    file = reference / "some-processor-6.143.8-avx2" / "linear.json"
    file.write_text(json.dumps({"rows": rows_of(REFERENCE, **{key: 24.0})}))
    assert run(reference) == code
    assert (f"SKIPPED: the ceiling is {now_gb_s} GB/s, the reference's 24.0" in capsys.readouterr().out) == (not code)


def test_the_model_of_the_processor_is_read(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    one = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    cpuinfo.write_text(one + "\n" + one.replace("17", "1"))
    assert processor_model(cpuinfo) == "25.17.1"
    assert processor_model(tmp_path / "missing") is None


def test_a_part_without_a_reference_is_told(measured, reference, capsys):
    assert gate.main(["--only", "kv_append", "--reference", str(reference)]) == 0
    assert "SKIPPED kv_append" in capsys.readouterr().out


def test_committed_references_have_ratios():
    """Each machine has ratios, so that the gate has something to compare."""
    found = [path for path in gate.OUT.glob("*/*.json") if path.stem in gate.PARTS]
    assert found
    for path in found:
        assert gate.ratios(json.loads(path.read_text())["rows"]), path


def test_every_committed_result_has_a_section_of_tables():
    found = sorted(OUT.glob("*/*.json"))
    assert {path.stem for path in found} == set(PARTS)
    for path in found:
        result = json.loads(path.read_text())
        text = tables.section(result)
        assert all(row["shape"] in text for row in result["rows"]), path
