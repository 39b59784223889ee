"""Placements of single experts give Hugging Face's tokens wherever experts run and however wrong predictions are."""

from __future__ import annotations

import pytest

from harness.engine.emitter import Emitter
from harness.machine.base import CPU, GPU, H2D
from strategies.expert_offload.pipeline import ExpertPipeline
from strategies.expert_offload.placement import Placement
from strategies.expert_offload.policies import AbsentOnCpu, OnDemandOnly
from tests.contract.placing import Cache, Slots, placed
from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.simulating import expert_bytes, link_bytes, simulated_engine, tokens_by_expert, tokens_of
from tests.fake_device import cuda_machine


class LargeCache(Cache):
    """A config with slots for most of the model's experts."""

    def num_slots(self, spec) -> tuple[int, int]:
        return 24, 0


CASES = {
    "on demand, shuffled": (lambda: shuffled(0), OnDemandOnly(), Slots, 1, {"on_demand"}),
    "CPU, shuffled": (lambda: shuffled(1), AbsentOnCpu(), Slots, 1, {"cpu"}),
    "by lot, shuffled": (lambda: shuffled(2), None, Slots, 2, {"on_demand", "prefetched", "cpu"}),
    "by lot in a cache, shuffled": (lambda: shuffled(3), None, Cache, 1, {"on_demand", "prefetched", "cpu", "wasted"}),
    "by lot, emulated": (lambda: emulated(0.01), None, Slots, 1, {"on_demand", "prefetched", "cpu", "withdrawn"}),
    "by lot, cuda": (lambda: cuda_machine(CAPACITIES_BYTES), None, Slots, 1, {"on_demand", "prefetched", "cpu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_exact(tiny, case):
    machine, placer, slots, micro_batches, ways = CASES[case]
    work, built = requests(5, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4), []
    engine = engine_on(machine(), tiny, work, kv_blocks=40)

    def build(on):
        built.append(placed(on, placer, slots=slots, micro_batches=micro_batches))
        return built[0]

    run_to_end(engine, build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    counted = built[0].counted()
    assert all(counted[way] > 0 for way in ways), counted


@pytest.mark.parametrize("slots", [Slots, Cache])
def test_what_the_link_brings_is_what_was_counted(slots):
    """On demand, or prefetched and not withdrawn; and each prefetch is used, wasted or withdrawn, whatever its cache
    did with it in the meantime."""
    engine, _ = simulated_engine("deepseek-v2-lite", 6, max_new_tokens=8)
    built = []
    run_to_end(engine, lambda on: built.append(placed(on, slots=slots)) or built[0])
    counted = built[0].counted()
    size = engine.store.experts(engine.spec.moe_layers[0])[0].layout.nbytes
    brought = sum(abs(nbytes - size) < 1 for nbytes in link_bytes(engine, "weights", H2D))
    assert brought == counted["on_demand"] + counted["issued"] - counted["withdrawn"], counted
    assert min(counted["issued"], counted["on_demand"], counted["wasted"]) > 0, counted
    assert counted["issued"] == sum(counted[way] for way in ("prefetched", "wasted", "withdrawn")), counted


class Backwards(OnDemandOnly):
    """Names the experts of a layer in descending order, whether they have arrived or not."""

    def place(self, view):
        return Placement(on_gpu=view.active[::-1])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_experts_that_have_arrived_run_in_one_op_and_each_other_one_as_it_comes(
    tiny, monkeypatch, together, micro_batches
):
    """Whatever the order in which the placer names them, nothing that is there waits for what is on its way."""
    views, groups, view = [], [], ExpertPipeline._view
    monkeypatch.setattr(ExpertPipeline, "_view", lambda *of, **how: views.append(view(*of, **how)) or views[-1])
    emit = Emitter.experts

    def noted(emitter, it, layer, parts):
        if parts:
            groups.append((len(views), it.batch.index, sorted(parts)))
        return emit(emitter, it, layer, parts)

    monkeypatch.setattr(Emitter, "experts", noted)
    work = requests(5, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4)
    engine = engine_on(emulated(), tiny, work, kv_blocks=40)
    how = {"slots": LargeCache, "micro_batches": micro_batches, "experts_together": together}
    run_to_end(engine, lambda on: placed(on, Backwards(), **how))
    several = 0
    for number, seen in enumerate(views, start=1):
        ran = [(index, experts) for at, index, experts in groups if at == number]
        arrived = {expert for expert in seen.active if seen.there.get(expert)} if together else set()
        first = [(index, experts) for index, experts in ran if arrived.intersection(experts)]
        others = [experts for _, experts in ran[len(first) :]]
        assert ran[: len(first)] == first, "what has arrived comes first"
        assert len(first) == len({index for index, _ in first}), "in one op of each micro-batch"
        assert set().union(*(experts for _, experts in first)) == arrived
        absent = [expert for expert in seen.active[::-1] if expert not in arrived]
        assert list(dict.fromkeys(expert for experts in others for expert in experts)) == absent, (
            "in the placer's order"
        )
        assert all(len(experts) == 1 for experts in others)
        several += any(len(experts) > 1 for _, experts in first)
    assert several > 2 if together else several == 0, "a large cache has several of a layer's experts"


def test_sums_of_the_host_never_overwrite_those_of_the_device(tiny, monkeypatch):
    load = Emitter.load_expert_sums
    monkeypatch.setattr(Emitter, "load_expert_sums", lambda emit, it, layer, to, **how: load(emit, it, layer, **how))
    work = requests(2, vocab_size=tiny.spec.vocab_size)
    with pytest.raises(AssertionError, match="`moe_out` holds sums"):
        run_to_end(engine_on(shuffled(0), tiny, work, kv_blocks=40), placed)


def test_experts_on_the_host_return_the_tickets_of_all_that_is_submitted(monkeypatch):
    engine, _ = simulated_engine("deepseek-v2-lite", 2)
    submitted, checked, submit, run = [], [], engine.machine.submit, Emitter.experts_on_host

    def noted(*args, **how):
        submitted.append(submit(*args, **how))
        return submitted[-1]

    def on_host(*given):
        before = len(submitted)
        tickets = run(*given)
        assert tickets == submitted[before:]
        checked.extend(tickets)
        return tickets

    engine.machine.submit = noted
    monkeypatch.setattr(Emitter, "experts_on_host", on_host)
    run_to_end(engine, lambda on: placed(on, predictor="none", packet_mb=1.0))
    assert checked


@pytest.mark.parametrize("cpu_share", [0.0, 0.5, 1.0])
def test_chosen_experts_are_charged_by_what_the_router_said(cpu_share):
    """Every lane's bytes are active experts times an expert's size, beside those of tokens: nothing is an average."""
    engine, routing = simulated_engine("qwen3-30b-a3b", 6)
    built = []

    def build(on):
        built.append(placed(on, cpu_share=cpu_share, predictor="none", batch_size=6, packet_mb=1.0))
        return built[0]

    run_to_end(engine, build)
    counted, routed = built[0].counted(), tokens_by_expert(engine, routing)
    on_gpu = counted["prefetched"] + counted["cached"] + counted["on_demand"]
    assert on_gpu + counted["cpu"] == sum((each > 0).sum() for each in routed)
    device, host = expert_bytes(engine, GPU), expert_bytes(engine, CPU)
    size = engine.store.experts(0)[0].layout.nbytes
    assert len(host) <= len(routed), "those of a layer on the host run in one op"
    assert len(device) < on_gpu or not on_gpu, "and so do those that had arrived on the device"
    tokens = tokens_of(engine, device + host, on_gpu + counted["cpu"])
    assert tokens == pytest.approx(sum(each.sum() for each in routed))
    assert (counted["cpu"] > 0) == (cpu_share > 0) and (on_gpu > 0) == (cpu_share < 1)
    came = [round(nbytes) for nbytes in link_bytes(engine, "weights", H2D)]
    assert came == [size] * (counted["on_demand"] + counted["issued"] - counted["withdrawn"])
