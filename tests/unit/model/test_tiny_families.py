"""The tests' own checkpoints: nothing in them is neutral, so that nothing can be left out unnoticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_families import PLAIN_ROPE, VARIANTS, VOCAB_SIZE, folder_of, kind_of

PROMPT = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(0))
EFFECTS = {  # variant -> entries that would switch off something it has
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": False},
    "qwen3_moe-every-second": {"sliding_window": 100, "rope_parameters": PLAIN_ROPE},
    "olmoe-clipped": {"clip_qkv": None, "norm_topk_prob": False},
    "qwen2_moe-every-second": {"norm_topk_prob": False, "sliding_window": 100},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 100.0, "rope_theta": 5e5}},
    "deepseek_v2": {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": {"topk_group": 4, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "rope_interleave": False},
    "gpt_oss": {"sliding_window": 100, "swiglu_limit": 7.0},
}
EFFECTS_CASES = [(name, key, value) for name, entries in EFFECTS.items() for key, value in entries.items()]


def model_of(name: str, **entries: object) -> torch.nn.Module:
    found = AutoModelForCausalLM.from_pretrained(folder_of(name), attn_implementation="eager", **entries)
    return found.eval()


@torch.inference_mode()
def tokens(model: torch.nn.Module) -> list[int]:
    return model(PROMPT).logits[0].argmax(-1).tolist()


@contextmanager
def neutral(tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.fill_(kind_of(name, tensor.dim())[0])
    yield
    for name, tensor in tensors.items():
        tensor.copy_(kept[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_all_that_is_stored_is_random(name):
    stored = load_file(folder_of(name) / "model.safetensors")
    assert len(stored) > 20
    for tensor_name, tensor in stored.items():
        about, std = kind_of(tensor_name, tensor.dim())
        assert 0.1 * std < tensor.std() < 2 * std and abs(tensor.mean() - about) < std, tensor_name


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_no_norm_bias_or_sink_can_be_left_out(name):
    """In all layers at once, as code would leave it out."""
    model = model_of(name)
    of_kind: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for tensor_name, tensor in model.state_dict().items():
        if tensor.dim() == 1 or "bias" in tensor_name:
            of_kind[".".join(part for part in tensor_name.split(".") if not part.isdigit())][tensor_name] = tensor
    assert len(of_kind) >= 3
    right = tokens(model)
    for kind, tensors in of_kind.items():
        with neutral(tensors):
            assert tokens(model) != right, kind
    assert tokens(model) == right


@pytest.mark.parametrize(("name", "key", "value"), EFFECTS_CASES, ids=lambda value: str(value))
def test_windows_groups_and_limits_change_the_tokens(name, key, value):
    assert tokens(model_of(name, **{key: value})) != tokens(model_of(name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_stored_as_asked_but_for_the_correction_bias(dtype):
    for name, tensor in load_file(folder_of("deepseek_v3", dtype) / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else getattr(torch, dtype)), name
