"""Attention over a cache of latents: Hugging Face's tokens wherever it runs, and either way of attending in prompts."""

from __future__ import annotations

import pytest
import torch

import harness.engine.ops.compute as compute
import harness.engine.ops.data as data
import harness.engine.ops.host as host
import harness.engine.ops.paged as paged
from harness.engine.kv_placement import place_kv
from harness.machine.base import MachineError
from harness.model.checkpoint import Checkpoint, part_views
from harness.model.config import ModelConfig
from harness.model.loading import load_model
from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_declared import EXCUSED, forgets, watch
from tests.contract.test_strategies import PLANNED
from tests.contract.watching import untouched
from tests.tiny_families import VARIANTS, VOCAB_SIZE, tiny_family

pytestmark = pytest.mark.usefixtures("short_probes")

ON_GPU = {"attention": "gpu", "gpu_kv_staging_mb": 0.02}
SHAPES = {  # what is widest: kv_lora_rank, qk_nope_head_dim, v_head_dim
    "values": (40, 24, 48),
    "queries": (40, 48, 24),
    "heads, so that prompts attend to latents": (12, 24, 32),
}


def run(checkpoint: Checkpoint, strategy: str, change: dict | None = None, *, seed: int = 0, num_gpus: int = 1) -> None:
    work, values = requests(6, vocab_size=VOCAB_SIZE, longest=30, seed=seed), PLANNED[strategy] | (change or {})
    machine = shuffled(seed, num_gpus=num_gpus)
    engine = engine_on(machine, checkpoint, work, kv_blocks=60, num_gpus=num_gpus, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    assert_right(checkpoint, engine)


def assert_right(checkpoint: Checkpoint, engine) -> None:
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(engine.sequences)
    assert report.ok, report.first_mismatch


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("strategy", "change"), [("moelens", {}), ("moelens", ON_GPU), ("deepspeed_zero", {})])
def test_any_width_may_be_the_largest(monkeypatch, shape, strategy, change):
    kv_rank, nope_dim, value_dim = SHAPES[shape]
    widths = {"kv_lora_rank": kv_rank, "qk_nope_head_dim": nope_dim, "v_head_dim": value_dim}
    monkeypatch.setitem(VARIANTS, "of this shape", VARIANTS["deepseek_v3"] | widths)
    checkpoint = tiny_family("of this shape")
    assert checkpoint.spec.expands_prefill == (2 * kv_rank >= nope_dim + value_dim)
    run(checkpoint, strategy, change)


@pytest.mark.parametrize(("strategy", "change"), [("moelens", {}), ("flexgen", {}), ("deepspeed_zero", {})])
def test_prompts_may_attend_to_latents(strategy, change):
    folder = str(tiny_family("deepseek_v2").folder)
    checkpoint, by_flops = (
        load_model(ModelConfig(name="m", path=folder, expand_prefill=choice), has_tensors=True, seed=0).checkpoint
        for choice in (False, None)
    )
    assert checkpoint is not None and by_flops is not None
    assert by_flops.spec.expands_prefill and not checkpoint.spec.expands_prefill
    run(checkpoint, strategy, change, seed=1)


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3-moonlight"])
@pytest.mark.parametrize("strategy", ["ondemand", "moelightning"])
def test_gpus_that_share_the_heads(variant, num_gpus, strategy):
    run(tiny_family(variant), strategy, seed=2, num_gpus=num_gpus)


def test_gpus_that_share_the_heads_each_cache_all_latents():
    checkpoint = tiny_family("deepseek_v3")
    engine = engine_on(shuffled(0, num_gpus=2), checkpoint, [], kv_blocks=10, num_gpus=2)
    pieces = [each.kv.pieces for each in engine.ranks]
    assert [each.spec.num_heads for each in engine.ranks] == [2, 2]
    assert pieces == [checkpoint.spec.kv_pieces] * 2
    assert engine.machine.tiers["pinned"].holders()["kv cache"] == 2 * 10 * 4 * checkpoint.spec.kv_bytes_per_token
    engine.machine.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_share_of_the_cache_on_the_device(seed):
    checkpoint = tiny_family("deepseek_v3")
    work = requests(10, vocab_size=VOCAB_SIZE, longest=30, seed=seed)
    engine = engine_on(shuffled(seed), checkpoint, work, kv_blocks=60)
    block_bytes = 4 * checkpoint.spec.kv_bytes_per_token
    place_kv(engine, host_bytes=30 * block_bytes, device_bytes=30 * block_bytes)
    values = PLANNED["moelens"] | {"overlap_prefill_decode": False, "n_real": 60, "profile_repeats": 1}
    run_to_end(engine, lambda e: strategy_of(e, values))
    assert_right(checkpoint, engine)


def test_the_kernel_and_the_familys_own_math_agree(monkeypatch):
    """The family's is what runs where device memory is not the host's."""
    compared = []

    def both(self, ctx, q, cached, out):
        self.by_family(ctx, q, cached, out)
        again = torch.empty_like(out)
        original(self, ctx, q, cached, again)
        torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5)
        compared.append(len(out))

    original = paged.DecodeAttentionPaged.by_kernel
    monkeypatch.setattr(paged.DecodeAttentionPaged, "by_kernel", both)
    run(tiny_family("deepseek_v2"), "deepspeed_zero")
    assert sum(compared) > 20


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3"])
@torch.inference_mode()
def test_both_ways_give_the_same_values_of_heads(variant):
    """Before the output projection, for prompts of different lengths."""
    checkpoint, lens = tiny_family(variant), [17, 1, 30]
    spec, family = checkpoint.spec, checkpoint.family
    parts = {part.name: part for part in family.layer_parts(spec, 1)}
    weights = {}
    for name in ("attention_in", "attention_out"):
        region = torch.empty(parts[name].nbytes, dtype=torch.uint8)
        checkpoint.read_part(1, parts[name], region)
        weights[name] = part_views(parts[name], region)
    hidden = torch.randn(sum(lens), spec.hidden_dim, generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lens])

    def attend(num_expanded: int) -> torch.Tensor:
        found = family.latents_in(spec, weights["attention_in"], hidden, positions, num_expanded, 1)
        if num_expanded:
            return family.prefill_attention(spec, {}, found.q, found.k, found.v, lens, 1)
        k = found.latent[:, None]
        mixed = family.prefill_attention(spec, {}, found.absorbed, k, k[..., : spec.latent.kv_rank], lens, 1)
        return family.from_latents(spec, weights["attention_out"], mixed, 1)

    torch.testing.assert_close(attend(0), attend(sum(lens)), rtol=1e-4, atol=1e-5)


WATCHED = ("moelens", "moelens on the gpu", "a share of the cache on the device", "deepspeed_zero", "tensor parallel")


def test_every_op_touches_what_it_declares_and_nothing_else():
    machines = [watch(tiny_family("deepseek_v3"), name, planner=False) for name in WATCHED]
    assert untouched(machines) <= set(EXCUSED)


FORGOTTEN = {
    "latents are written undeclared": forgets("moelens", compute.AttentionIn, "writes", lambda op: (op.acts.latent,)),
    "keys of prompts are read undeclared": forgets(
        "moelens", compute.PrefillAttention, "reads", lambda op: (op.acts.k,)
    ),
    "latents are offloaded unread": forgets("moelens", data.OffloadQkv, "reads", lambda op: (op.acts.latent,)),
    "latents are attended to unread": forgets("moelens", host.DecodeAttention, "reads", lambda op: op.kv_keys),
    "the newest latents are attended to unread": forgets(
        "moelens on the gpu", compute.DecodeAttentionDevice, "reads", lambda op: (op.acts.latent,)
    ),
    "latents on the device are attended to unread": forgets(
        "deepspeed_zero", paged.DecodeAttentionPaged, "reads", lambda op: op.kv_keys
    ),
}


@pytest.mark.parametrize(("run", "cls", "which", "keys"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_what_an_op_does_not_declare_is_named(monkeypatch, run, cls, which, keys):
    original = cls.__init__

    def forgetful(self, *args, **kwargs):
        original(self, *args, **kwargs)
        left_out = keys(self)
        setattr(self, which, tuple(key for key in getattr(self, which) if key not in left_out))

    monkeypatch.setattr(cls, "__init__", forgetful)
    with pytest.raises(MachineError, match=rf"Undeclared: {cls.__name__} .* and does not declare it"):
        watch(tiny_family("deepseek_v3"), run)
