"""What a family may have beyond Mixtral's reaches every op that needs it: a made-up family gives its own tokens."""

from __future__ import annotations

import pytest

from tests.contract.placing import placed
from tests.contract.running import engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import YAMLS
from tests.contract.toy_family import INGREDIENTS, PlainToy, make_toy

HOST_EXPERTS = {"batch_size": 4, "micro_batch_size": 2, "gpu_ffn": False, "resident_kv": 0.0}
ACCUMULATED = {"on_device": False, "attention_batch": 2, "prefill_attention_batch": 2, "cpu_attention": 0.5}
RUNS = {
    "attention on the host": ("moelens", {"n_real": 40}, 1),
    "attention over staged keys": ("moelens", {"attention": "gpu", "gpu_kv_staging_mb": 0.02, "n_real": 60}, 1),
    "attention on the device": ("deepspeed_zero", {}, 1),
    "on two GPUs": ("ondemand", {}, 2),
    "experts on the host": ("moelightning", {"policy": HOST_EXPERTS | {"gpu_attention": False}}, 1),
    "attention on the device, experts on the host": ("flexgen", {"policy": HOST_EXPERTS | {"gpu_attention": True}}, 1),
    "tokens that accumulate": ("moegen_h", {"search": False, "policy": ACCUMULATED}, 1),
}


@pytest.fixture(scope="module")
def toy(tiny, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield make_toy(tiny, tmp_path_factory.mktemp("toy") / "toy", patch)


@pytest.fixture(scope="module")
def work(toy):
    return requests(5, vocab_size=toy.spec.vocab_size, longest=14, max_new_tokens=5, seed=3)


@pytest.fixture(scope="module")
def expected(toy, work):
    return [PlainToy(toy).generate(request.prompt_ids, request.max_new_tokens) for request in work]


@pytest.mark.parametrize("run", RUNS)
def test_tokens(toy, work, expected, run):
    name, change, num_gpus = RUNS[run]
    values = YAMLS[name] | change
    engine = engine_on(shuffled(1, num_gpus=num_gpus), toy, work, kv_blocks=40, num_gpus=num_gpus, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    assert [sequence.generated for sequence in engine.sequences] == expected


@pytest.mark.parametrize("name", ["moelightning", "moelens"])
def test_the_device_keeps_attentions_own_weights_once(toy, work, name):
    own_bytes = sum(toy.family.attention_part(toy.spec, layer).nbytes for layer in range(toy.spec.num_layers))
    engine = engine_on(shuffled(1), toy, work, kv_blocks=40, values=YAMLS[name])
    strategy_of(engine, YAMLS[name])
    assert engine.machine.tiers["device"].holders()["weights of attention itself"] == own_bytes


def test_tokens_where_experts_are_placed_by_lot(toy, work, expected):
    engine = engine_on(shuffled(1), toy, work, kv_blocks=40)
    run_to_end(engine, placed)
    assert [sequence.generated for sequence in engine.sequences] == expected


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_matters_for_the_tokens(toy, work, expected, ingredient):
    plain = PlainToy(toy)
    without = [plain.generate(request.prompt_ids, request.max_new_tokens, (ingredient,)) for request in work]
    assert without != expected
