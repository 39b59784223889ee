"""FP8 in blocks and MXFP4 are widened as they are read: against plain float64 loops, and against transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness.config import ConfigError
from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import WeightFiles
from harness.model.layout import Section, TensorSlice
from harness.model.quantised import weights_in

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 6]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def stored_in(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def e4m3(byte: int) -> float:
    """One sign, four exponent bits biased by 7, three of the fraction; all ones are NaN (OFP8, §4)."""
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def e2m1(bits: int) -> float:
    sign, exponent, fraction = -1.0 if bits & 8 else 1.0, (bits >> 1) & 3, bits & 1
    return sign * (fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


@pytest.fixture
def fp8(tmp_path):
    """A matrix whose sides are no multiples of a block's."""
    numbers = (random(10, 15) * 100).to(torch.float8_e4m3fn)
    scales = random(3, 3, seed=2).exp()
    stored_in(tmp_path, w=numbers, w_scale_inv=scales, plain=random(3))
    bits, factors = numbers.view(torch.uint8).tolist(), scales.double().tolist()
    expected = [[e4m3(bits[i][j]) * factors[i // 4][j // 6] for j in range(15)] for i in range(10)]
    return tmp_path, torch.tensor(expected, dtype=torch.float64)


@pytest.fixture
def mxfp4(tmp_path):
    """Two experts with three outputs of 64 inputs."""
    blocks, scales = random_bytes(2, 3, 2, 16), 120 + random_bytes(2, 3, 2) % 16
    stored_in(tmp_path, gate_up_proj_blocks=blocks, gate_up_proj_scales=scales, plain=random(3))
    expected = torch.zeros(2, 64, 3, dtype=torch.float64)
    for expert in range(2):
        for output in range(3):
            for i in range(64):
                byte = int(blocks[expert, output, i // 32, i % 32 // 2])
                half = byte >> 4 if i % 2 else byte & 15
                expected[expert, i, output] = e2m1(half) * 2.0 ** (int(scales[expert, output, i // 32]) - 127)
    return tmp_path, expected


def test_fp8_is_multiplied_block_by_block(fp8):
    folder, expected = fp8
    weights = weights_in(folder, {"quantization_config": FP8})
    assert weights.names() == ["plain", "w"] and tuple(weights.header("w").shape) == (10, 15)
    torch.testing.assert_close(weights.tensor("w")[()].double(), expected, rtol=1e-7, atol=0)
    assert torch.equal(weights.tensor("plain"), WeightFiles(folder).tensor("plain"))


def test_fp8_is_what_transformers_makes_of_it(tmp_path):
    """It takes whole blocks only."""
    stored_in(tmp_path, w=random(8, 12).to(torch.float8_e4m3fn), w_scale_inv=random(2, 2, seed=2).exp())
    stored = load_file(tmp_path / "model.safetensors")
    expected = Fp8Dequantize(None)._dequantize_one(stored["w"], stored["w_scale_inv"], torch.float32)
    weights = weights_in(tmp_path, {"quantization_config": FP8})
    assert torch.equal(weights.tensor("w")[()], expected)


def test_mxfp4_is_looked_up_and_shifted(mxfp4):
    folder, expected = mxfp4
    weights = weights_in(folder, {"quantization_config": MXFP4})
    assert weights.names() == ["gate_up_proj", "plain"] and weights.header("gate_up_proj").shape == (2, 64, 3)
    assert torch.equal(weights.tensor("gate_up_proj")[()].double(), expected)


def test_mxfp4_is_what_transformers_makes_of_it(mxfp4):
    folder, _ = mxfp4
    stored = load_file(folder / "model.safetensors")
    expected = convert_moe_packed_tensors(stored["gate_up_proj_blocks"], stored["gate_up_proj_scales"])
    weights = weights_in(folder, {"quantization_config": MXFP4})
    assert torch.equal(weights.tensor("gate_up_proj")[()].bfloat16(), expected)


SLICES = [
    TensorSlice(),
    TensorSlice((1,), transposed=True),
    TensorSlice((0, Section(0, 1, 1), Section(2, 3, 3)), transposed=True),
    TensorSlice((1, Section(1, 2, 2), Section(1, 2, 3, interleaved=True))),
    TensorSlice((Section(1, 2, 2), Section(0, 2, 4))),
]


@pytest.mark.parametrize("piece", SLICES)
def test_a_slice_is_that_of_the_whole(mxfp4, piece):
    folder, expected = mxfp4
    tensor = weights_in(folder, {"quantization_config": MXFP4}).tensor("gate_up_proj")
    assert piece.shape_of(tuple(tensor.shape)) == tuple(piece.of(expected).shape)
    assert torch.equal(piece.of(tensor).double(), piece.of(expected))


@pytest.mark.parametrize(
    "index", [(Section(1, 2, 2),), (Section(0, 1, 5), Section(2, 3, 3)), (Section(1, 2, 5, interleaved=True),)]
)
def test_a_slice_of_fp8_keeps_its_blocks(fp8, index):
    folder, expected = fp8
    tensor, piece = weights_in(folder, {"quantization_config": FP8}).tensor("w"), TensorSlice(index)
    torch.testing.assert_close(piece.of(tensor).double(), piece.of(expected), rtol=1e-7, atol=0)


def test_only_what_is_asked_for_is_widened(mxfp4, monkeypatch):
    folder, _ = mxfp4
    tensor = weights_in(folder, {"quantization_config": MXFP4}).tensor("gate_up_proj")
    widened, ldexp = [], torch.ldexp
    monkeypatch.setattr(torch, "ldexp", lambda x, scales: widened.append(scales.numel()) or ldexp(x, scales))
    TensorSlice((1, Section(0, 1, 1), Section(0, 1, 3))).of(tensor)
    assert widened == [2]  # the groups of one output of one expert


BAD = {
    "a list": ([1], r"quantization_config: must be a mapping, got \[1\]"),
    "another method": ({"quant_method": "awq"}, "quantization_config.quant_method: must be fp8 or mxfp4, got 'awq'"),
    "no method": ({"bits": 4}, "quantization_config.quant_method: must be fp8 or mxfp4, got None"),
    "static": (FP8 | {"activation_scheme": "static"}, "activation_scheme: must be 'dynamic', got 'static'"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt: must be 'e4m3', got 'e5m2'"),
    "no block": (FP8 | {"weight_block_size": None}, "weight_block_size: must be two positive integers, got None"),
    "odd block": (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: must be two positive integers"),
    "unknown": (MXFP4 | {"rotation": 1}, "quantization_config.rotation: unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_methods_are_refused_by_name(fp8, name):
    folder, _ = fp8
    entry, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        weights_in(folder, {"quantization_config": entry})


def test_tensors_that_do_not_fit_their_scales_are_named(tmp_path):
    numbers = random(8, 12).to(torch.float8_e4m3fn)
    stored_in(tmp_path, w=numbers, w_scale_inv=torch.ones(2, 3), alone=numbers.clone(), cube=numbers[None].clone())
    weights = weights_in(tmp_path, {"quantization_config": FP8})
    for name, message in (
        ("w", r"w_scale_inv: shape must be \(2, 2\), one scale a block, got \(2, 3\)"),
        ("alone", "alone_scale_inv: tensor missing"),
        ("cube", r"cube: must be a matrix, as it is in FP8, got \(1, 8, 12\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            weights.header(name)
    with pytest.raises(ConfigError, match="w: dtype must be one of F64, F32, F16, BF16, got F8_E4M3"):
        weights_in(tmp_path, {}).header("w")
    packed = random_bytes(2, 3, 2, 16)
    stored_in(
        tmp_path, x_blocks=packed, x_scales=packed[:, :, :, 0].clone(), y_blocks=packed.clone(), y_scales=packed.clone()
    )
    weights = weights_in(tmp_path, {"quantization_config": MXFP4})
    assert weights.header("x").shape == (2, 64, 3)
    with pytest.raises(ConfigError, match=r"y_blocks: shape must be \[experts, outputs, groups, 16\]"):
        weights.header("y")


def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts' matrices in FP8, with the largest number of a block at 448."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        padded = torch.zeros([-(-size // 32) * 32 for size in tensor.shape])
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor
        blocks = padded.unflatten(0, (-1, 32)).unflatten(-1, (-1, 32))  # [rows, 32, columns, 32]
        scales = blocks.abs().amax((1, 3)) / 448
        found[name] = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        found[name] = found[name][: tensor.shape[0], : tensor.shape[1]].contiguous()
        found[name + "_scale_inv"] = scales
    return found


def test_a_checkpoint_in_fp8_reads_as_its_widened_copy(tiny_copy, tmp_path):
    """In float32 and bfloat16, whole and in shards for two GPUs; and transformers' reference gets the same numbers."""
    tensors = quantise(load_file(tiny_copy / "model.safetensors"))
    stored_in(tiny_copy, **tensors)
    config = json.loads((tiny_copy / "config.json").read_text())
    entry = FP8 | {"weight_block_size": [32, 32]}
    (tiny_copy / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    quantised = Checkpoint(tiny_copy)
    assert quantised.stored_dtypes() == {"float32", "F8_E4M3"} and quantised.spec.dtype == "float32"
    (tmp_path / "wide").mkdir()
    stored_in(tmp_path / "wide", **{name: tensor.clone() for name, tensor in quantised.tensors().items()})
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    for dtype in ("float32", "bfloat16"):
        pair = Checkpoint(tiny_copy, dtype), Checkpoint(tmp_path / "wide", dtype)
        for sources in (pair, [each.shard(1, 2) for each in pair]):
            for part in sources[0].family.layer_parts(sources[0].spec, 1):
                ours, wide = (torch.zeros(part.nbytes, dtype=torch.uint8) for _ in range(2))
                for source, out in zip(sources, (ours, wide), strict=True):
                    source.read_part(1, part, out)
                assert torch.equal(ours, wide), part.name
    assert quantised.fingerprint() != Checkpoint(tmp_path / "wide").fingerprint()


def test_scales_are_part_of_the_fingerprint(tmp_path, fp8):
    folder, _ = fp8
    weights = weights_in(folder, {"quantization_config": FP8})
    before = weights.samples("w")
    stored = load_file(folder / "model.safetensors")
    stored_in(folder, **(stored | {"w_scale_inv": stored["w_scale_inv"] * 2}))
    assert weights_in(folder, {"quantization_config": FP8}).samples("w") != before
