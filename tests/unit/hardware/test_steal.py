"""Steal time and the time of other processes, from a written /proc/stat."""

import os
from types import SimpleNamespace

import pytest

from harness.hardware import steal


@pytest.fixture
def reading(tmp_path, monkeypatch):
    """Reads what is written: a line of /proc/stat, and seconds of this process."""
    stat = tmp_path / "stat"
    monkeypatch.setattr(steal, "_STAT", stat)
    monkeypatch.setattr(steal, "_ticks_a_second", lambda: 100)

    def read(line: str, own_s: float = 0.0):
        stat.write_text(f"cpu  {line}\ncpu0 1 2 3\n")
        own = SimpleNamespace(user=own_s, system=0.0, children_user=0.0, children_system=0.0)
        monkeypatch.setattr(os, "times", lambda: own)
        return steal.read_cpu_times()

    return read


def test_share_of_all_cores_between_two_readings(reading):
    before = reading("100 0 50 800 10 0 5 35 0 0")
    after = reading("150 0 60 900 10 0 5 75 20 0")
    assert after.stolen_share_since(before) == pytest.approx(40 / 200)
    assert after.stolen_share_since(after) == 0.0


def test_time_of_others_is_what_this_process_did_not_spend(reading):
    """2 s of two cores: 2.0 s busy, of which 1.5 s are our own; 0.1 s stolen."""
    before = reading("100 10 50 800 10 1 5 35 0 0", own_s=7.0)
    after = reading("280 10 60 1000 10 4 12 45 0 0", own_s=8.5)
    assert after.taken_share_since(before) == pytest.approx((0.5 + 0.1 - steal._CLOCK_ERROR_S) / 4.1)
    alone = reading("280 10 60 1000 10 4 12 35 0 0", own_s=9.0)
    assert alone.taken_share_since(before) == 0.0, "the clock's error is nobody's disturbance"


def test_systems_that_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(steal, "_STAT", tmp_path / "absent")
    assert steal.read_cpu_times() is None


def test_the_real_system_tells_or_not():
    times = steal.read_cpu_times()
    assert times is None or (times.total >= times.busy > 0 and times.own_s > 0)
