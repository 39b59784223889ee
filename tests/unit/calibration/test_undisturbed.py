"""Measurements beside which others had the cores are made again; what stays disturbed is told by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.calibration import memory, undisturbed
from harness.calibration.undisturbed import MAX_ATTEMPTS, Undisturbed


class Times:
    """Readings of a machine on which others have the given shares of the cores, one measurement after another."""

    def __init__(self, shares: list[float]) -> None:
        self._shares = iter(shares)

    def taken_share_since(self, earlier) -> float:
        return next(self._shares)


@pytest.fixture
def measured(monkeypatch):
    """Runs one measurement, numbered by attempts, beside the given disturbances."""
    slept: list[float] = []
    monkeypatch.setattr(undisturbed.time, "sleep", slept.append)

    def run(shares: list[float], patience_s: float = 1e9):
        times = Times(shares)
        monkeypatch.setattr(undisturbed, "read_cpu_times", lambda: times)
        monkeypatch.setattr(undisturbed, "PATIENCE_S", patience_s)
        told: list[str] = []
        watch, numbers = Undisturbed(told.append), iter(range(100))
        return watch("a measurement", lambda: next(numbers)), watch, told

    return run


def test_the_first_quiet_one_counts(measured):
    result, watch, told = measured([0.5, 0.1, 0.0, 0.9])
    assert (result, watch.num_rejected, watch.disturbed, told) == (2, 2, [], [])


def test_the_least_disturbed_of_all_is_kept_and_told(measured):
    result, watch, told = measured([0.5, 0.4, 0.2, 0.3, 0.6, 0.5])
    assert MAX_ATTEMPTS == 6
    assert result == 2
    assert watch.disturbed == ["a measurement"]
    assert told == ["DISTURBED: others had 20% of the cores during: a measurement"]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 2)), max_size=20))
def test_disturbed_points_count_only_where_there_is_no_other(draws):
    """Of two tables, with two kinds of op each; counted beside it one by one."""
    watch, tables = Undisturbed(), {"a": {}, "b": {}}
    for number, (disturbed, table, key, feature) in enumerate(draws):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(undisturbed, "MAX_ATTEMPTS", 1)
            patch.setattr(undisturbed, "read_cpu_times", lambda share=float(disturbed): Times([share]))
            point = watch("a point", lambda feature=feature, number=number: ((float(feature),), float(number)))
        watch.place_in(tables[table]).setdefault(key, []).append(point)
    watch.fill_gaps()
    found = {(at, key, *point) for at, table in tables.items() for key, points in table.items() for point in points}
    quiet = {draw[1:] for draw in draws if not draw[0]}
    counting = [number for number, draw in enumerate(draws) if not draw[0] or draw[1:] not in quiet]
    assert found == {(*draws[n][1:3], (float(draws[n][3]),), float(n)) for n in counting}
    assert sum(len(points) for table in tables.values() for points in table.values()) == len(counting)


def test_patience_ends(measured):
    result, watch, _ = measured([0.5], patience_s=0.0)
    assert (result, watch.num_rejected, watch.disturbed) == (0, 0, ["a measurement"])


def test_systems_that_do_not_tell_are_believed(monkeypatch):
    monkeypatch.setattr(undisturbed, "read_cpu_times", lambda: None)
    assert Undisturbed()("m", lambda: 7) == 7


@pytest.mark.parametrize(
    ("cache_bytes", "ram_bytes", "expected"),
    [(0, 64e9, 512e6), (33e6, 64e9, 512e6), (500e6, 64e9, 2000e6), (500e6, 8e9, 1200e6)],
    ids=["unknown cache", "small cache", "large cache", "little memory"],
)
def test_memory_is_measured_beyond_the_caches(cache_bytes, ram_bytes, expected):
    assert memory.working_set_bytes(int(cache_bytes), int(ram_bytes)) == expected


@pytest.mark.parametrize(("text", "expected"), [("491520K\n", 503316480), ("32M", 33554432), ("4096", 4096)])
def test_a_cache_is_as_large_as_the_system_says(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CACHES", tmp_path)
    assert memory.stated_cache_bytes(2) == 0
    (tmp_path / "index2").mkdir()
    (tmp_path / "index2" / "size").write_text(text)
    assert (memory.stated_cache_bytes(2), memory.stated_cache_bytes(3)) == (expected, 0)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((27, 27, 26, 20, 16, 15), 3),  # 20 lies below the mean of 27 and 15
        ((27, 15, 27, 15), 1),
        ((27, 27, 21), 2),
        ((9, 9, 9), 3),
        ((9,), 1),
        ((9, 10), 1),  # faster beyond: there is no cache to speak of
    ],
)
def test_a_cache_holds_what_is_read_as_fast_as_little(rates, expected):
    assert memory.held_bytes(dict(enumerate(rates, start=1))) == expected


@pytest.mark.parametrize(
    ("rates", "expected"), [((26, 26, 13, 13), 282), ((26, 26, 18.4, 13), 400), ((26, 26, 8, 13), 245)]
)
def test_what_a_cache_holds_lies_between_the_sizes_that_were_read(rates, expected):
    """Below 18.38 GB/s; 26 at 200 bytes, and at 400 half of it, just enough, or far less than later."""
    assert memory.held_bytes(dict(zip((100, 200, 400, 800), rates, strict=True))) == pytest.approx(expected, abs=3)


def test_the_last_cache_is_measured(monkeypatch):
    """Others have most of the stated cache: buffers of up to 30 MB are read twice as fast as larger ones."""
    seen = []
    monkeypatch.setattr(
        memory, "_gb_s", lambda num_bytes, run: seen.append(num_bytes) or (20 if num_bytes <= 3e7 else 9)
    )
    monkeypatch.setattr(memory, "stated_cache_bytes", {2: 2_000_000, 3: 500_000_000}.__getitem__)
    found = memory.measure_caches(lambda name, measure: measure(), ram_bytes=int(8e9))
    assert found[2] == 2_000_000 and 3e7 / 1.4 < found[3] <= 3e7
    assert 3.5e8 < max(seen) <= 512e6 and min(seen) == 4_000_000
    seen.clear()
    memory.measure_caches(lambda name, measure: measure(), ram_bytes=int(1e8))
    assert max(seen) <= 0.15 * 1e8
