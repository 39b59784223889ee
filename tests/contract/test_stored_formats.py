"""Checkpoints in FP8 (DeepSeek-V3) and MXFP4 (gpt-oss) run as their widened copies do in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import read_json
from tests.contract.layerwise import first_difference, of_transformers, weights_of
from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_families import PROMPT
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import VOCAB_SIZE, folder_of

BLOCK = 20  # no divisor of most sizes
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def in_fp8(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return what is stored of a tensor and what it means; None where it stays as it is."""
    if tensor.dim() != 2 or any(word in name for word in ("embed_tokens", "lm_head", "gate.weight")):
        return None
    numbers, scales = torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn), []
    wide = torch.zeros(tensor.shape)
    for i in range(0, tensor.shape[0], BLOCK):
        scales.append([])
        for j in range(0, tensor.shape[1], BLOCK):
            at = slice(i, i + BLOCK), slice(j, j + BLOCK)
            scale = tensor[at].abs().max() / 448
            numbers[at] = (tensor[at] / scale).to(torch.float8_e4m3fn)
            wide[at] = numbers[at].float() * scale
            scales[-1].append(scale)
    return {name: numbers, name + "_scale_inv": torch.tensor(scales)}, wide


def in_mxfp4(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return random numbers instead of a tensor [experts, inputs, outputs], as they are stored and what they mean."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, inputs, outputs = tensor.shape
    generator = torch.Generator().manual_seed(len(name) + inputs)
    halves = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
    scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator)
    values = torch.tensor(FP4)[halves] * 2.0 ** (scales - 127).repeat_interleave(32, dim=-1)
    blocks = (halves[..., 0::2] + 16 * halves[..., 1::2]).view(experts, outputs, inputs // 32, 16)
    stored = {name + "_blocks": blocks.to(torch.uint8), name + "_scales": scales.to(torch.uint8)}
    return stored, values.transpose(1, 2).contiguous()


FORMATS = {"deepseek_v3": (in_fp8, FP8), "gpt_oss": (in_mxfp4, MXFP4)}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request, tmp_path_factory) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint in few bits, and its widened copy."""
    narrow, entry = FORMATS[request.param]
    folders = [tmp_path_factory.mktemp(request.param) / name for name in ("stored", "wide")]
    stored: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, tensor in load_file(folder_of(request.param) / "model.safetensors").items():
        found = narrow(name, tensor)
        stored |= found[0] if found else {name: tensor}
        wide[name] = found[1] if found else tensor
    assert len(stored) > len(wide)
    for folder, tensors in zip(folders, (stored, wide), strict=True):
        shutil.copytree(folder_of(request.param), folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _add_entry(folders[0], entry)
    return Checkpoint(folders[0]), Checkpoint(folders[1])


def _add_entry(folder: Path, entry: dict[str, object]) -> None:
    config = read_json(folder / "config.json") | {"quantization_config": entry}
    (folder / "config.json").write_text(json.dumps(config))


def test_every_part_is_that_of_the_widened_copy_in_transformers(pair):
    stored, wide = pair
    assert first_difference(stored, weights_of(stored), of_transformers(wide, PROMPT)) is None


def test_tokens(pair):
    stored, wide = pair
    work = requests(4, vocab_size=VOCAB_SIZE, longest=24, max_new_tokens=5, seed=6)
    engine = engine_on(shuffled(4), stored, work, kv_blocks=40, values=YAMLS["moelens"])
    run_to_end(engine, lambda e: strategy_of(e, YAMLS["moelens"]))
    for checkpoint in (stored, wide):  # what verification widens, and what it finds widened
        report = check_tokens(checkpoint, engine.sequences)
        assert report.checked == len(work) and report.ok, report.first_mismatch
