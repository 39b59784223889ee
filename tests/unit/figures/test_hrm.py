"""The Hierarchical Roofline Model against brute force, the paper's own relations, and its case study on the L4."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies.offloading.planning.hrm import Bound, Hierarchy, Level
from tests.conftest import ROOT

RATES = st.floats(1e6, 1e15)
INTENSITIES = st.floats(1e-3, 1e6)
NAMES = ("gpu", "cpu", "disk", "peer", "tape")


@st.composite
def hierarchies(draw: st.DrawFn, min_levels: int = 2, max_levels: int = 5) -> Hierarchy:
    names = NAMES[: draw(st.integers(min_levels, max_levels))]
    levels = tuple(Level(name=name, flops_s=draw(RATES), bytes_s=draw(RATES)) for name in names)
    pairs = draw(st.lists(st.sampled_from(list(permutations(names, 2))), unique=True))
    return Hierarchy(levels=levels, links_bytes_s={pair: draw(RATES) for pair in pairs})


TWO_LEVELS = hierarchies(max_levels=2).filter(lambda h: h.link_bytes_s("cpu", "gpu") > 0)


def level(hierarchy: Hierarchy, name: str) -> Level:
    return next(level for level in hierarchy.levels if level.name == name)


@given(hierarchies())
def test_the_link_between_two_levels_is_the_widest_of_all_ways(hierarchy):
    names = [level.name for level in hierarchy.levels]
    for source, target in permutations(names, 2):
        others = [name for name in names if name not in (source, target)]
        widest = 0.0
        for count in range(len(others) + 1):
            for middle in permutations(others, count):
                hops = list(zip((source, *middle), (*middle, target), strict=True))
                widest = max(widest, min(hierarchy.links_bytes_s.get(hop, 0.0) for hop in hops))
        assert hierarchy.link_bytes_s(source, target) == widest


@given(hierarchies(), st.dictionaries(st.sampled_from(NAMES), INTENSITIES), st.data())
def test_what_a_task_reaches_is_what_its_slowest_part_allows(hierarchy, intensities, data):
    """Time per FLOP of every roof, the largest of them: a loop over parts instead of the minimum of rates."""
    names = [level.name for level in hierarchy.levels]
    intensities = {name: value for name, value in intensities.items() if name in names}
    at = data.draw(st.sampled_from(names))
    slowest = 1 / level(hierarchy, at).flops_s
    for name, flops_per_byte in intensities.items():
        rate = level(hierarchy, at).bytes_s if name == at else hierarchy.link_bytes_s(name, at)
        slowest = max(slowest, (1 / flops_per_byte) / rate if rate else float("inf"))
    bound = hierarchy.attainable(at, intensities)
    assert bound.flops_s == pytest.approx(1 / slowest if slowest < float("inf") else 0.0)
    assert bound.roof in {"compute", "memory", *names} - {at}, "a level's own memory is called memory"


@given(hierarchies(), INTENSITIES)
def test_without_transfer_it_is_the_ordinary_roofline(hierarchy, intensity):
    for here in hierarchy.levels:
        assert hierarchy.attainable(here.name, {here.name: intensity}).flops_s == hierarchy.local(here.name, intensity)


@given(TWO_LEVELS, INTENSITIES)
def test_below_equation_9_moving_never_pays(hierarchy, intensity):
    """Whatever its intensity at the target: the link alone holds the task below what its home reaches."""
    threshold = hierarchy.threshold_to_move("cpu", "gpu", intensity)
    assume(abs(intensity / threshold - 1) > 1e-9)
    moved_at_best = hierarchy.link_bytes_s("cpu", "gpu") * intensity
    assert (intensity < threshold) == (moved_at_best < hierarchy.local("cpu", intensity))


@given(TWO_LEVELS)
def test_the_first_turning_point_solves_equation_9(hierarchy):
    cpu = level(hierarchy, "cpu")
    assume(abs(hierarchy.link_bytes_s("cpu", "gpu") / cpu.bytes_s - 1) > 1e-6)  # moving costs nothing, or it does
    point = hierarchy.first_turning_point("cpu", "gpu")
    for factor in (0.5, 0.9, 0.999, 1.001, 2.0, 1000.0):
        intensity = point * factor or factor
        pays = hierarchy.link_bytes_s("cpu", "gpu") * intensity >= hierarchy.local("cpu", intensity) * (1 - 1e-9)
        assert pays == (factor > 1 or point == 0.0)
    if point:
        assert hierarchy.threshold_to_move("cpu", "gpu", point) == pytest.approx(point)


@given(TWO_LEVELS, INTENSITIES)
def test_the_second_turning_point_is_where_the_link_stops_to_bind(hierarchy, own):
    point = hierarchy.second_turning_point("cpu", "gpu", own)
    assert hierarchy.attainable("gpu", {"gpu": own, "cpu": point * 0.99}).roof == "cpu"
    assert hierarchy.attainable("gpu", {"gpu": own, "cpu": point * 1.01}).roof != "cpu"


@given(TWO_LEVELS, INTENSITIES)
def test_at_the_balance_point_more_of_either_intensity_alone_gains_nothing(hierarchy, own):
    point = hierarchy.balance_point("cpu", "gpu", own)
    gpu = level(hierarchy, "gpu")
    if point is None:
        assert gpu.bytes_s * own >= gpu.flops_s
        return
    here = hierarchy.attainable("gpu", {"gpu": own, "cpu": point}).flops_s
    more_of_one = [{"gpu": own * 1.5, "cpu": point}, {"gpu": own, "cpu": point * 1.5}]
    assert [hierarchy.attainable("gpu", more).flops_s for more in more_of_one] == pytest.approx([here, here])
    both = hierarchy.attainable("gpu", {"gpu": own * 1.5, "cpu": point * 1.5}).flops_s
    assert both == pytest.approx(min(1.5 * here, gpu.flops_s))
    assert point == pytest.approx(hierarchy.second_turning_point("cpu", "gpu", own)), "P_2, where memory is the limit"


@given(hierarchies(), st.data())
def test_the_best_level_is_the_best(hierarchy, data):
    names = [level.name for level in hierarchy.levels]
    home = data.draw(st.sampled_from(names))
    intensities = {name: data.draw(INTENSITIES) for name in names}
    best = hierarchy.best_level(home, intensities)

    def reached(name: str) -> float:
        link = float("inf") if name == home else hierarchy.link_bytes_s(home, name) * intensities[home]
        return min(level(hierarchy, name).flops_s, level(hierarchy, name).bytes_s * intensities[name], link)

    assert reached(best) == max(reached(name) for name in names)


def test_a_task_of_two_sources_by_hand():
    """4 FLOP/B at the GPU, half of its bytes from the CPU and a tenth through it from the disk."""
    levels = (
        Level(name="gpu", flops_s=1000.0, bytes_s=100.0),
        Level(name="cpu", flops_s=50.0, bytes_s=20.0),
        Level(name="disk", flops_s=0.0, bytes_s=1.0),
    )
    h = Hierarchy(levels=levels, links_bytes_s={("cpu", "gpu"): 10.0, ("disk", "cpu"): 1.0})
    assert h.link_bytes_s("disk", "gpu") == 1.0
    assert h.link_bytes_s("gpu", "disk") == 0.0
    assert h.attainable("gpu", {"gpu": 4.0}) == Bound(flops_s=400.0, roof="memory")
    assert h.attainable("gpu", {"gpu": 4.0, "cpu": 8.0}) == Bound(flops_s=80.0, roof="cpu")
    assert h.attainable("gpu", {"gpu": 4.0, "cpu": 8.0, "disk": 40.0}) == Bound(flops_s=40.0, roof="disk")
    assert h.first_turning_point("cpu", "gpu") == 5.0
    assert h.second_turning_point("cpu", "gpu", 4.0) == 40.0
    assert h.balance_point("cpu", "gpu", 4.0) == 40.0
    assert h.balance_point("cpu", "gpu", 10.0) is None
    assert h.best_level("cpu", {"gpu": 4.0, "cpu": 2.0, "disk": 1.0}) == "cpu"
    assert h.best_level("cpu", {"gpu": 4.0, "cpu": 6.0, "disk": 1.0}) == "gpu"


def test_it_needs_no_torch():
    code = "import sys, strategies.offloading.planning.hrm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
