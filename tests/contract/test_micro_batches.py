"""The micro-batched pipelines: orders of submission as in Figure 6, memory that is too small, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
import yaml

from harness.config import ConfigError
from harness.machine.base import CPU, D2H, GPU, H2D, PIN
from harness.machine.shuffled import ShuffledMachine
from harness.model.checkpoint import Checkpoint
from strategies.offloading.pipeline import MicroBatchPipeline
from tests.conftest import ROOT
from tests.contract.running import CAPACITIES_BYTES, check_tokens, engine_on, requests, run_to_end, strategy_of

pytestmark = pytest.mark.usefixtures("short_probes")

NAMES = ("moelightning", "fastdecode", "flexgen_c", "flexgen")
YAMLS = {name: yaml.safe_load((ROOT / f"conf/strategy/{name}.yaml").read_text()) for name in NAMES}
SMALL_DEVICE = CAPACITIES_BYTES | {"device": 2_240_000}


class Recording(ShuffledMachine):
    """Keeps every op in the order of its submission."""

    def __init__(self, seed: int = 0, capacities_bytes=CAPACITIES_BYTES) -> None:
        super().__init__(capacities_bytes=capacities_bytes, seed=seed)
        self.ops = []

    def submit(self, lane, op, *, after=(), urgent=False):
        assert not (urgent and op.kind != "poison kv"), f"{op} is urgent on a plain FIFO"
        self.ops.append((lane, op))
        return super().submit(lane, op, after=after, urgent=urgent)


def run(tiny, name: str, change: dict, machine: ShuffledMachine, *, count: int = 12, longest: int = 40):
    """What `change` leaves open of the policy is the search's, but for what decides which ops there are."""
    values = YAMLS[name] | change
    values["policy"] = {"gpu_ffn": True, "resident_kv": 0.0} | values["policy"]
    work = requests(count, vocab_size=tiny.spec.vocab_size, longest=longest, max_new_tokens=6, seed=4)
    work = [replace(request, max_new_tokens=5) for request in work]
    engine = engine_on(machine, tiny, work, kv_blocks=400, values=values)
    built = []

    def build(on):
        built.append(strategy_of(on, values))
        return built[0]

    run_to_end(engine, build)
    return engine, built[0]


def decode_steps(machine: Recording) -> list[list]:
    """Ops by decode step: from one to the next upload of a step's first tokens."""
    steps, current = [], []
    for lane, op in machine.ops:
        if op.kind == "upload tokens" and op.micro_batch == 0:
            steps.append(current)
            current = []
        if op.kind not in ("poison", "poison kv"):
            current.append((lane, op))
    steps.append(current)
    return [s for s in steps if any(op.kind == "upload tokens" and op.batch.decode for _, op in s)]


def on_lane(step, lane, *kinds):
    return [(op.kind, op.layer, op.micro_batch) for on, op in step if on == lane and (not kinds or op.kind in kinds)]


def test_cgopipe_is_algorithm_1(tiny):
    """A step's lanes, written down anew from the paper: 12 sequences in 4 micro-batches, 4 layers, 4 pages."""
    machine = Recording()
    policy = {"batch_size": 12, "micro_batch_size": 3, "gpu_attention": False}
    run(tiny, "moelightning", {"policy": policy}, machine)
    layers, m = tiny.spec.num_layers, 4
    step = decode_steps(machine)[1]
    order = [(i, j) for i in range(layers) for j in range(m)]
    gpu = [("attention in", *at) for at in order[:2]]  # the prologue
    for place, at in enumerate(order):
        gpu += [("attention out", *at), ("experts", *at), ("combine", *at)]
        gpu += [("head", None, at[1])] if at[0] == layers - 1 else []
        gpu += [("attention in", *ahead) for ahead in order[place + 2 : place + 3]]
    assert on_lane(step, GPU, "attention in", "attention out", "experts", "combine", "head") == gpu
    assert on_lane(step, CPU, "decode attention") == [("decode attention", *at) for at in order]
    assert on_lane(step, D2H, "offload qkv") == [("offload qkv", *at) for at in order]
    h2d = []
    for i, j in order:
        h2d += [("load attention", i, j), ("weights", (i + 1) % layers, None)]
    assert on_lane(step, H2D, "load attention", "weights") == h2d
    staged = [("weights to pinned", (1 + place // m) % layers, None) for place in range(layers * m)]
    assert on_lane(step, PIN) == staged, "layer 1 (counted from 0) up to layer 0 of the next step, page by page"
    pages = [op.nbytes for lane, op in step if lane == H2D and op.kind == "weights"]
    assert max(pages) - min(pages) < 4 * 64, "equal pages"


@pytest.mark.parametrize(
    ("name", "change"),
    [("moelightning", {"paging": False}), ("fastdecode", {}), ("flexgen_c", {}), ("flexgen", {})],
)
def test_without_pages_a_layer_comes_in_one_block(tiny, name, change):
    machine = Recording()
    policy = {"batch_size": 12, "micro_batch_size": 3}
    run(tiny, name, change | {"policy": policy}, machine)
    for step in decode_steps(machine):
        blocks = [layer for kind, layer, _ in on_lane(step, H2D, "weights")]
        assert blocks == [1, 2, 3, 0]


def test_flexgen_fetches_kv_one_micro_batch_ahead_and_never_attends_on_the_cpu(tiny):
    machine = Recording()
    run(tiny, "flexgen", {"policy": {"batch_size": 12, "micro_batch_size": 3}}, machine)
    step = decode_steps(machine)[1]
    order = [(i, j) for i in range(tiny.spec.num_layers) for j in range(4)]
    both = [(op.kind, op.layer, op.micro_batch) for _, op in step if op.kind in ("load kv", "attention in")]
    expected = [("load kv", 0, 0)]
    for place, at in enumerate(order):
        expected += [("load kv", *ahead) for ahead in order[place + 1 : place + 2]] + [("attention in", *at)]
    assert both == expected
    assert not on_lane(step, CPU, "decode attention")
    assert len(on_lane(step, GPU, "decode attention (device)")) == len(order)


def test_flexgen_c_overlaps_no_cpu_attention(tiny):
    machine = Recording()
    run(tiny, "flexgen_c", {"policy": {"batch_size": 12, "micro_batch_size": 3}}, machine)
    step = decode_steps(machine)[1]
    gpu = on_lane(step, GPU, "attention in", "attention out")
    assert gpu == [(kind, i, j) for i in range(4) for j in range(4) for kind in ("attention in", "attention out")]


@pytest.mark.parametrize("name", NAMES)
def test_padded_prompts_are_computed_kept_and_read_as_long_as_the_longest_of_their_batch(tiny, name):
    """Every prompt prefilled, and every context attended to, as if of one length; same tokens."""
    machine = Recording()
    engine, _ = run(tiny, name, {"padding": True, "policy": {"batch_size": 6, "micro_batch_size": 3}}, machine)
    ops = [op for _, op in machine.ops]
    batches = {
        op.batch for op in ops if op.kind == "upload tokens" and set(op.batch.sequences) <= set(engine.sequences)
    }
    assert batches, "all others are those of the rate probe"
    padded = 0
    for batch in batches:
        lens = {s.prompt_len + s.padding for s in batch.sequences}
        assert len(lens) == 1
        (length,) = lens
        assert set(batch.prefill_lens) <= lens
        padded += batch.num_padding_tokens
        for s, read in zip(batch.decode, batch.on_host.read_lens.tolist(), strict=True):
            assert length < read <= s.max_tokens + s.padding
    assert padded == sum(s.padding for s in engine.sequences) > 50
    read_by = {"decode attention", "load kv", "decode attention (device)"}
    attended = [op for op in ops if op.kind in read_by and op.layer == 0]
    assert [op.cost_features()[1] for op in attended] == [int(op.batch.on_host.read_lens.sum()) for op in attended]
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 12, report.first_mismatch


def test_experts_on_the_cpu_leave_the_link_to_the_rest_and_the_gpu_to_other_micro_batches(tiny):
    """F_g = 0: no expert's weights in decode; a micro-batch takes its sums when it enters the next layer."""
    machine = Recording()
    policy = {
        "batch_size": 12,
        "micro_batch_size": 3,
        "gpu_attention": False,
        "gpu_ffn": False,
        "resident_weights": 0.0,
    }
    run(tiny, "moelightning", {"policy": policy}, machine)
    step, layers, m = decode_steps(machine)[1], tiny.spec.num_layers, 4
    order = [(i, j) for i in range(layers) for j in range(m)]
    gpu = [("attention in", *at) for at in order[:2]]
    for place, at in enumerate(order):
        gpu.append(("attention out", *at))
        for i, j in order[place + 2 : place + 3]:
            gpu += [("combine", i - 1, j)] * (i > 0) + [("attention in", i, j)]
    for j in range(m):
        gpu += [("combine", layers - 1, j), ("head", None, j)]
    assert on_lane(step, GPU, "attention in", "attention out", "experts", "combine", "head") == gpu
    assert on_lane(step, CPU, "experts") == [("experts", *at) for at in order]
    assert {len(op.experts) for lane, op in step if lane == CPU and op.kind == "experts"} == {tiny.spec.num_experts}
    parts = [part for layer in range(layers) for part in tiny.family.layer_parts(tiny.spec, layer)]
    dense = sum(part.nbytes for part in parts if part.expert is None)
    streamed = sum(op.nbytes for lane, op in step if lane == H2D and op.kind == "weights")
    assert streamed == pytest.approx(dense, rel=0.01)


def test_no_batch_is_larger_than_the_policy_says(tiny):
    """Four sequences are two micro-batches of up to three, whose rows at the experts on the CPU are four."""
    machine = Recording()
    policy = {"batch_size": 4, "micro_batch_size": 3, "gpu_ffn": False}
    engine, _ = run(tiny, "moelightning", {"policy": policy}, machine)
    sizes = [sum(op.batch.num_tokens for _, op in step if op.kind == "upload tokens") for step in decode_steps(machine)]
    assert max(sizes) == 4
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 12, report.first_mismatch


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_a_given_share_of_weights_is_planned_for_in_the_whole_experts_that_stay(tiny, share):
    """An eighth of the experts is 12 % of a layer."""
    policy = {"batch_size": 12, "micro_batch_size": 3, "resident_weights": share}
    engine, strategy = run(tiny, "moelightning", {"policy": policy}, Recording())
    layers = [sum(part.layout.nbytes for part in parts.values()) for parts in engine.store.layers]
    planned = strategy.plan["resident_weights"]
    assert planned <= share
    assert strategy.plan["resident_weights_gb"] * 1e9 == pytest.approx(planned * sum(layers))


def test_experts_on_the_cpu_in_bfloat16(tiny):
    """With the kernel that CPUs have for it; every choice near the best of a float32 reference."""
    checkpoint = Checkpoint(tiny.folder, "bfloat16")
    engine, _ = run(checkpoint, "flexgen_c", {"policy": {"gpu_ffn": False}}, Recording())
    report = check_tokens(checkpoint, engine.sequences)
    assert report.ok and report.checked == 12, report.first_mismatch


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_the_kv_cache_on_the_device_is_attended_to_there(tiny, name, seed):
    """r_c of the batch's cache, counted in device memory; none of it crosses the link."""
    machine = Recording(seed)
    policy = {"batch_size": 12, "micro_batch_size": 3, "resident_kv": 0.5, "resident_weights": 0.0}
    engine, strategy = run(tiny, name, {"policy": policy}, machine)
    cache = engine.kv.device
    assert cache is not None and engine.kv.host is not None
    nbytes = cache.allocator.num_blocks * 4 * tiny.spec.kv_bytes_per_token
    needed = [-(-s.max_tokens // 4) * 4 * tiny.spec.kv_bytes_per_token for s in engine.sequences]
    assert 0 <= strategy.plan["resident_kv_gb"] * 1e9 - nbytes < 4 * tiny.spec.kv_bytes_per_token
    assert strategy.plan["resident_kv_gb"] * 1e9 == pytest.approx(0.5 * sum(needed))
    ops = [op for _, op in machine.ops]
    uploaded = [op.batch for op in ops if op.kind == "upload tokens"]
    first_batch = [s for batch in takewhile(lambda batch: batch.prefill, uploaded) for s in batch.prefill]
    there = sum(needed[s.request.request_id] for s in first_batch if s.kv_on_device)
    assert nbytes - max(needed) < there <= nbytes, "full but for a rest"
    assert {"append kv", "append kv (device)", "decode attention (paged)"} <= {op.kind for op in ops}
    for op in ops:
        if op.kind in ("load kv", "decode attention"):
            assert not any(s.kv_on_device for s in op.batch.decode[: op.batch.on_host.num_decode])
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 12, report.first_mismatch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_that_do_not_fit_the_device_wait_in_pinned_memory(tiny, name, seed):
    machine = Recording(seed, SMALL_DEVICE)
    engine, strategy = run(
        tiny, name, {"policy": {"batch_size": 24, "micro_batch_size": 4}}, machine, count=24, longest=100
    )
    assert strategy.plan["hidden_states_wait_in"] == "pinned memory"
    kinds = {op.kind for _, op in machine.ops}
    assert {"load hidden", "offload hidden"} <= kinds
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 24, report.first_mismatch


def test_a_device_too_small_for_the_policy_is_refused(tiny):
    machine = ShuffledMachine(capacities_bytes=CAPACITIES_BYTES | {"device": 1_700_000}, seed=0)
    with pytest.raises(ConfigError, match=r"^hardware.device_memory_gb: 0.0017 GB is too small: this policy needs"):
        run(tiny, "moelightning", {"policy": {"resident_weights": 0.9}}, machine, longest=400)


MISTAKES = [
    ("moelightning", {"batch_size": 4, "micro_batch_size": 4}, "strategy.policy.micro_batch_size", "at least 2"),
    ("flexgen", {"gpu_attention": False}, "strategy.policy.gpu_attention", "flexgen_c"),
    ("flexgen_c", {"gpu_attention": True}, "strategy.policy.gpu_attention", "CPU"),
    ("fastdecode", {"gpu_attention": True}, "strategy.policy.gpu_attention", "CPU"),
]


@pytest.mark.parametrize(("name", "policy", "field", "told"), MISTAKES)
def test_a_policy_that_cannot_run_is_refused(tiny, name, policy, field, told):
    with pytest.raises(ConfigError) as caught:
        run(tiny, name, {"policy": policy}, ShuffledMachine(capacities_bytes=CAPACITIES_BYTES, seed=0))
    assert caught.value.field == field
    assert told in caught.value.message


@pytest.mark.parametrize("staging", [False, True])
def test_parts_that_stay_on_the_device_are_left_out_of_the_pages(tiny, staging):
    """Some lie amid others that are streamed, so that a page has several pieces."""
    keys = [(0, "attention_in"), (2, "attention_out"), (2, "expert.3"), (3, "expert.7")]
    policy = {"batch_size": 6, "micro_batch_size": 2, "resident_weights": 0.0}
    values = YAMLS["moelightning"] | {"staging": staging, "policy": {"gpu_ffn": True, "resident_kv": 0.0} | policy}
    machine = Recording()
    work = requests(8, vocab_size=tiny.spec.vocab_size, max_new_tokens=4, seed=4)
    engine = engine_on(machine, tiny, work, kv_blocks=400, values=values)
    engine.resident.keep("some weights", keys)
    kept = [engine.store.layers[layer][name].buffer for layer, name in keys]
    machine.ops.clear()
    run_to_end(engine, lambda on: strategy_of(on, values))
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == len(work), report.first_mismatch
    read = [op.source for _, op in machine.ops if op.kind == ("weights to pinned" if staging else "weights")]
    spans = {(source.offset_bytes, source.offset_bytes + source.nbytes) for source in read}
    assert len(spans) > len(engine.store.layers)
    for part in kept:
        assert not [at for at in spans if at[0] < part.offset_bytes + part.nbytes and part.offset_bytes < at[1]], part


def test_where_the_phase_changes_what_the_other_one_has_prefetched_is_dropped(tiny):
    """F_g = 0: two streams of weights, of whole layers for prefill and of the rest for decode. Machines that begin
    nothing before they must still have all of the next pass's first layer to withdraw."""
    policy = {"batch_size": 4, "micro_batch_size": 2, "gpu_ffn": False, "resident_weights": 0.0}
    machine = Recording()
    machine._eager = 0.0
    withdrawn, cancel = [], machine.cancel
    machine.cancel = lambda ticket: withdrawn.append((len(phases), ticket)) or cancel(ticket)
    phases, original = [], MicroBatchPipeline.run

    def noted(self, plan):
        phases.append("prefill" if plan.prefill else "decode")
        return original(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatchPipeline, "run", noted)
        run(tiny, "fastdecode", {"policy": policy}, machine)
    changes = {n for n in range(2, len(phases) + 1) if phases[n - 1] != phases[n - 2]}
    assert len(changes) > 3
    during = {number for number, ticket in withdrawn if ticket.op.kind == "weights"}
    assert changes <= during, "what was fetched for the phase that is over must not stay in its stream"
