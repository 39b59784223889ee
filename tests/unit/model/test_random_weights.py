"""Weights made in memory: right scales, no two parts alike, and an engine runs on them."""

from __future__ import annotations

import pytest
import torch

from harness.config import ConfigError
from harness.model import random_weights
from harness.model.checkpoint import part_views
from harness.model.loading import load_model
from harness.model.random_weights import RandomWeights
from harness.run.session import Session
from harness.settings import parse_settings
from tests.composing import composed

SMALL = [f"model.spec.{name}={value}" for name, value in {"num_layers": 2, "hidden_dim": 64, "num_heads": 4,
         "num_kv_heads": 2, "head_dim": 16, "expert_dim": 96, "vocab_size": 384}.items()]  # fmt: skip


def settings(*overrides: str):
    return parse_settings(values(*overrides))


def values(*overrides: str):
    return composed("model=mixtral-8x7b", "model.path=random", "verify=off", *SMALL, *overrides)


def parts(source):
    spec, family = source.spec, source.family
    layers = [(i, part) for i in range(spec.num_layers) for part in family.layer_parts(spec, i)]
    return [*layers, (None, family.embedding_part(spec)), (None, family.head_part(spec))]


def read(source, layer, part) -> torch.Tensor:
    out = torch.full((part.nbytes,), 0xFF, dtype=torch.uint8)
    source.read_part(layer, part, out)
    return out


BIASES = [f"+model.recipe.{change}" for change in ("qkv_bias=true", "o_bias=true")]


@pytest.mark.parametrize(
    ("model", "small"),
    [
        ("mixtral-8x7b", SMALL),
        ("mixtral-tiny", []),
        ("qwen3-tiny", BIASES),
        ("qwen2-57b-a14b", SMALL),
    ],
)
def test_every_tensor_is_filled_to_scale(model, small, monkeypatch):
    monkeypatch.setattr(random_weights, "_BLOCK_NUMBERS", 1_299_709)
    source = RandomWeights(parse_settings(composed(f"model={model}", "model.path=random", *small)).model)
    seen = []
    for layer, part in parts(source):
        out = read(source, layer, part)
        for name, tensor in part_views(part, out).items():
            assert torch.isfinite(tensor.float()).all()
            if tensor.dim() == 1:
                assert tensor.float().std().item() == pytest.approx(0.2, rel=0.4)
                assert abs(tensor.float().mean().item() - name.endswith("norm")) < 0.2
                continue
            wanted = 1.0 if name == "embed" else source.spec.hidden_dim**-0.5
            assert tensor.float().std().item() == pytest.approx(wanted, rel=0.15)
            assert len(tensor) == 1 or (tensor[0] != tensor[1]).any(), "rows repeat"
            seen.append(tensor.flatten()[:64].float())
    alike = [i for i in range(len(seen)) for j in range(i) if torch.equal(seen[i], seen[j])]
    assert not alike, "two matrices begin alike"


def test_threads_and_pieces_do_not_show_and_a_seed_repeats_itself(monkeypatch):
    model = settings().model
    whole = RandomWeights(model, seed=3, threads=1)
    other = RandomWeights(model, seed=4)
    monkeypatch.setattr(random_weights, "_PIECE_NUMBERS", 1000)
    pieces = RandomWeights(model, seed=3, threads=4)
    for layer, part in parts(whole):
        assert torch.equal(read(whole, layer, part), read(pieces, layer, part))
    layer, part = parts(whole)[-1]
    assert not torch.equal(read(whole, layer, part), read(other, layer, part))


def test_what_is_there_already_is_left_and_whatever_is_not_is_written(monkeypatch):
    monkeypatch.setattr(random_weights, "_PIECE_NUMBERS", 1000)
    source, tiled, original = RandomWeights(settings().model), [], RandomWeights._tile
    monkeypatch.setattr(RandomWeights, "_tile", lambda *given: (tiled.append(1), original(*given)))
    for layer, part in parts(source):
        whole = read(source, layer, part)
        matrices = sum(len(tensor.shape) > 1 for tensor in part.tensors)
        tiled.clear()
        again = whole.clone()
        source.read_part(layer, part, again)
        assert not tiled and torch.equal(again, whole)
        big = max(part.tensors, key=lambda tensor: tensor.nbytes)
        for piece in range(0, big.nbytes // 2, 1000):  # one that was never reached
            at = big.offset_bytes + 2 * piece
            again[at : min(at + 2000, big.offset_bytes + big.nbytes)] = 0
            source.read_part(layer, part, again)
            assert torch.equal(again, whole)
        source.read_part(layer, part, again.zero_())
        assert len(tiled) == len(range(0, big.nbytes // 2, 1000)) + matrices and torch.equal(again, whole)
        RandomWeights(settings().model, seed=9).read_part(layer, part, again)
        assert not torch.equal(again, whole) or not matrices


def test_tokens_of_random_weights_cannot_be_verified():
    with pytest.raises(ConfigError, match="verify: must be off for model.path=random"):
        Session.of(values("verify=sample")).load_model()


def test_the_simulated_machine_knows_the_same_model():
    planned, random = (load_model(settings().model, has_tensors=h, seed=0).spec for h in (False, True))
    assert planned == random


def test_a_family_without_math_is_refused():
    unknown = ["model.spec.family=made_up", "model.path=random", "verify=off"]
    parsed = parse_settings(composed("model=dbrx", *unknown))
    with pytest.raises(ConfigError, match="unknown family 'made_up'"):
        load_model(parsed.model, has_tensors=True, seed=0)
