"""Steal time from a written /proc/stat."""

import pytest

from harness.hardware import steal


def test_share_of_all_cores_between_two_readings(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(steal, "_STAT", stat)
    stat.write_text("cpu  100 0 50 800 10 0 5 35 0 0\ncpu0 1 2 3\n")
    before = steal.read_cpu_times()
    stat.write_text("cpu  150 0 60 900 10 0 5 75 20 0\ncpu0 1 2 3\n")
    after = steal.read_cpu_times()
    assert after.stolen_share_since(before) == pytest.approx(40 / 200)
    assert after.stolen_share_since(after) == 0.0


def test_systems_that_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(steal, "_STAT", tmp_path / "absent")
    assert steal.read_cpu_times() is None
