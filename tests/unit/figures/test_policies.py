"""MoE-Lightning Fig. 10 and MoE-Lens Table 1: plans without runs."""

from __future__ import annotations

import pytest

from paper_figures.moelens import fig1, table1
from paper_figures.moelightning import fig10
from strategies.offloading.published.moelightning import published_plan

SIZES = (68, 292, 356)


@pytest.fixture(scope="module")
def fig10_rows():
    return fig10.compute(scales=(1, 10), links_gb_s=(100, 500), sizes=SIZES)


def test_fast_hosts_attend_and_slow_ones_do_not(fig10_rows):
    """Section 6.3: with a low scaling ratio it is not worth it at any link; the red points are where it is high."""
    for r in fig10_rows["rows"]:
        assert r["gpu_attention"] == (r["scale"] == 1)
        assert r["gain_over_other_attention"] > 0
        assert 0 <= r["weights_on_cpu"] <= 1 and 0 <= r["kv_on_cpu"] <= 1


def test_a_faster_link_or_host_never_costs_throughput(fig10_rows):
    rate = {(r["scale"], r["link_gb_s"]): r["decode_tok_s"] for r in fig10_rows["rows"]}
    for scale in (1, 10):
        assert rate[scale, 500] >= rate[scale, 100] * (1 - 1e-3)
    for link in (100, 500):
        assert rate[10, link] > rate[1, link]
    assert "| 500 | 10 | CPU |" in fig10.tables(fig10_rows)


def test_more_is_kept_off_the_device_with_a_faster_link(fig10_rows):
    held = {(r["scale"], r["link_gb_s"]): r["host_gb"] for r in fig10_rows["rows"]}
    assert held[1, 500] > held[1, 100]


def test_our_search_uses_the_host_memory_that_the_artifact_leaves():
    ours = table1.our_plan(98, 32, sizes=(164, 356))
    theirs = published_plan(table1.deployment(98, 32))
    assert theirs.host_bytes / (table1.HOST_GIB * table1.GIB) < ours["share"] <= 1
    assert ours["N"] > theirs.batch_size


def test_figure_1_on_a_small_batch():
    staged = ["strategy.policy.micro_batch_size=20", "strategy.policy.batch_size=40", "dataset.num_requests=40"]
    data = fig1.compute({"small": staged, "slow": [*staged, "strategy.planning=as_built"]})
    fast, slow = data["rows"]
    assert slow["busy"]["decode"]["h2d"] < fast["busy"]["decode"]["h2d"]
    assert slow["tok_s"] < fast["tok_s"] and (fast["planning"], slow["planning"]) == ("best", "as_built")
    for r in data["rows"]:
        assert all(0 <= share <= 1 + 1e-9 for phase in r["busy"].values() for share in phase.values())
    assert "(published 23.9%)" in fig1.tables(data) and "(published 16.5%)" in fig1.tables(data)
