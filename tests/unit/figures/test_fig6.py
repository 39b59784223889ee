"""The schedules of MoE-Lightning Fig. 6, recorded on the emulated machine with a tiny model."""

from __future__ import annotations

import pytest

from paper_figures.moelightning import fig6


@pytest.fixture(scope="module")
def data():
    return fig6.compute(("moelightning", "flexgen_c", "flexgen"), n=8, mu=2, prompt=32, steps=4, model="mixtral-tiny")


def lanes(window, lane, *kinds):
    return [entry for entry in window["lanes"].get(lane, ()) if entry[0] in kinds]


def test_every_schedule_is_recorded_under_the_same_policy(data):
    assert [w["strategy"] for w in data["windows"]] == ["CGOPipe (moelightning)", "S3 (flexgen_c)", "S4 (flexgen)"]
    for w in data["windows"]:
        assert w["label"] == data["label"] == "emulated" and len(w["layers"]) == fig6.LAYERS
        assert {batch for _, _, batch, *_ in lanes(w, "gpu", "experts")} == {0, 1, 2, 3}
        for name in w["lanes"]:
            assert 0 < fig6.busy(w, name) <= 1 + 1e-6


def test_where_attention_runs_and_what_crosses_the_link(data):
    """S4 moves keys and values and attends on the GPU; the others attend on the CPU. Only CGOPipe stages pages."""
    cgopipe, s3, s4 = data["windows"]
    for w in (cgopipe, s3):
        assert lanes(w, "cpu", "decode attention") and not lanes(w, "h2d", "load kv")
    assert lanes(s4, "h2d", "load kv") and not lanes(s4, "cpu", "decode attention")
    assert "pin" in cgopipe["lanes"] and "pin" not in s3["lanes"]


@pytest.mark.needs("matplotlib", extra="figures")
def test_table_and_picture(data, tmp_path):
    assert "| S4 (flexgen) |" in fig6.tables(data)
    figure = fig6.draw(data)
    figure.savefig(tmp_path / "fig6.png")
    assert (tmp_path / "fig6.png").stat().st_size > 10_000
