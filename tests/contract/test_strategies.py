"""Every strategy gives Hugging Face's tokens on every real machine, whatever order its ops run in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

from tests.conftest import ROOT
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of

pytestmark = pytest.mark.usefixtures("short_probes")
YAMLS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf/strategy").glob("*.yaml"))}
PLACED = {"table": "none", "profile_tokens": 24}  # experts come and go; a tiny model's would all stay on the device
OFFLOADED = {
    "extended_model": False,
    "policy": {"batch_size": 3, "micro_batch_size": 2, "gpu_ffn": True, "resident_weights": 0.3, "resident_kv": 0.0},
}
AT_ONCE = {  # what keeps a planner from measuring and searching for long
    "moelens": {"profile_repeats": 1},
    "moegen_g": {"search": False},
    "moegen_h": {"search": False},
    **dict.fromkeys(("moelightning", "fastdecode", "flexgen", "flexgen_c"), OFFLOADED),
    **dict.fromkeys(("prescope", "fiddler", "hybrimoe", "klotski", "fate"), PLACED),
    "expert_cache": PLACED | {"cache_slots": 12},
}
PLANNED = {name: values | AT_ONCE.get(name, {}) for name, values in YAMLS.items()}
VARIANTS = {
    "moelens": [
        {"overlap_prefill_decode": False, "n_real": 20},
        {"pipeline": "sequential"},
        {"attention": "gpu", "gpu_kv_staging_mb": 0.02},
        {"packet_mb": 0.002, "n_real": 40},
    ],
    "ondemand": [{"max_pass_tokens": 64}],
    "moelightning": [
        {"paging": False},
        {"planning": "as_built", "policy": {}},
        {"staging": False, "policy": {"micro_batch_size": 1}},
        {"policy": {"gpu_attention": True, "resident_weights": 0.4}},
        {"policy": {"batch_size": 3, "micro_batch_size": 2, "resident_weights": 0.8}, "packet_mb": 0.002},
        {"policy": {"resident_weights": 1.0}},
        {"padding": True, "policy": {"batch_size": 2}},
        {"policy": {"batch_size": 3, "resident_kv": 0.5}},
        {"policy": {"gpu_attention": True, "resident_kv": 0.3}},
        {"policy": {"gpu_ffn": False}},
        {"policy": {"batch_size": 6, "micro_batch_size": 2, "gpu_ffn": False, "resident_weights": 1.0}},
        {"paging": False, "padding": True, "policy": {"gpu_ffn": False, "gpu_attention": True, "batch_size": 2}},
    ],
    "fastdecode": [{"staging": True, "padding": True}],
    "flexgen_c": [
        {"staging": True, "policy": {"micro_batch_size": 3}},
        {"policy": {"resident_kv": 1.0, "gpu_ffn": False}},
        {"planning": "as_built", "policy": {"micro_batch_size": 2}},
    ],
    "flexgen": [
        {"planning": "as_built", "policy": {"micro_batch_size": 2}},
        {"planning": "as_built", "policy": {"batch_size": 5, "micro_batch_size": 2, "resident_kv": 0.5}},
        {"staging": True, "policy": {"micro_batch_size": 1}},
        {"padding": True, "policy": {"resident_kv": 0.5}},
    ],
    "moegen_g": [{"search": False, "policy": {"attention_batch": 2, "resident_experts": 3, "expert_slots": 2}}],
    "moegen_h": [{"search": False, "prefetch": False, "policy": {"cpu_attention": 0.5, "on_device": False}}],
    "deepspeed_zero": [{"batch_size": 3}, {"prefetch": False}],
    "llamacpp_split": [
        {"cpu_moe_layers": 1, "offload_min_tokens": 6, "slots": 2, "micro_batch_tokens": 20, "packet_mb": 0.002},
        {"cpu_moe_layers": 99, "offload_min_tokens": None, "context_tokens": 60},
    ],
    "prescope": [
        {"packet_mb": 0.004, "batch_size": 4, "profile_tokens": 16, "predictor": "statistics", "prefetch_groups": 3},
        {"packet_mb": 9.0, "batch_size": 3, "profile_tokens": 16, "schedule": "fixed", "table": "random"},
        {"profile_tokens": 16, "predictor": "none", "table": "none"},
        {"profile_tokens": 16, "batch_size": 3, "copies": "native", "table": "none"},
    ],
    "expert_cache": [{"packet_mb": 0.004, "batch_size": 4, "policy": "arc", "cache_slots": 5}],
    "fiddler": [{"packet_mb": 0.004, "batch_size": 4, "max_pass_tokens": 64}],
    "hybrimoe": [{"packet_mb": 0.004, "batch_size": 3, "prefetch_layers": 2, "score_weight": 1.0}],
    "klotski": [{"packet_mb": 0.004, "batch_size": 2, "num_batches": 3, "prefetch_slots": 1}],
    "fate": [{"packet_mb": 0.004, "batch_size": 4, "shallow_layers": 0}],
    "vllm_offload": [{"prefetch": True, "cpu_offload_gb": 0.0005}, {"continuous_batching": False, "max_num_seqs": 3}],
}
CASES = [(name, change) for name, list_ in VARIANTS.items() for change in list_]  # test_families.py has the defaults
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in change.items())}" for name, change in CASES]


@pytest.mark.parametrize(("name", "change"), CASES, ids=IDS)
def test_shuffled_machine(tiny, name, change):
    machine = shuffled(seed=len(str(change)))
    work = requests(8, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4)
    values = PLANNED[name] | change
    engine = engine_on(machine, tiny, work, kv_blocks=40, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


@pytest.mark.parametrize("name", YAMLS)
def test_emulated_machine(tiny, name):
    work = requests(8, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4)
    engine = engine_on(emulated(), tiny, work, kv_blocks=40, values=YAMLS[name])
    run_to_end(engine, lambda e: strategy_of(e, YAMLS[name]))
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


@pytest.mark.parametrize("name", YAMLS)
def test_requests_that_end_before_all_foresaw(tiny, name):
    """Requests for seven tokens end after one to nine; nothing that is planned may count on it."""
    work = requests(8, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=7, seed=3)
    ends = np.random.default_rng(0).integers(1, 10, size=len(work)).tolist()
    work = [replace(request, max_new_tokens=7, ends_after=end) for request, end in zip(work, ends, strict=True)]
    engine = engine_on(shuffled(4), tiny, work, kv_blocks=60, values=PLANNED[name])
    run_to_end(engine, lambda e: strategy_of(e, PLANNED[name]))
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


def test_moelens_preempts_and_still_gives_the_same_tokens(tiny):
    """A KV cache much smaller than the work: preempted sequences are prefilled again, prompt and generated."""
    work = requests(12, vocab_size=tiny.spec.vocab_size, longest=30, max_new_tokens=30)
    engine = engine_on(shuffled(3), tiny, work, kv_blocks=24)
    passes = run_to_end(engine, lambda e: strategy_of(e, YAMLS["moelens"] | {"n_real": 200}))
    assert sum(p.num_preemptions for p in passes) > 0
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


def test_a_request_that_can_never_fit_is_rejected_with_the_reason(tiny):
    work = requests(3, vocab_size=tiny.spec.vocab_size, longest=10)
    long = requests(1, vocab_size=tiny.spec.vocab_size, seed=9)[0]
    too_long = type(long)(request_id=99, prompt_ids=tuple([5] * 200), max_new_tokens=4, text=None)
    for values in PLANNED.values():
        engine = engine_on(shuffled(0), tiny, [too_long, *work], kv_blocks=20, values=values)
        given = engine.kv
        run_to_end(engine, lambda e, values=values: strategy_of(e, values))
        if engine.kv is not given:
            continue  # the strategy sizes its own cache
        rejected = [s for s in engine.sequences if s.reject_reason]
        assert [s.request.request_id for s in rejected] == [99]
        assert "KV blocks" in rejected[0].reject_reason
        assert check_tokens(tiny, engine.sequences).ok
