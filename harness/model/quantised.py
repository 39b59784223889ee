"""Read weights that are stored in fewer bits, widened as they are read: FP8 in blocks (DeepSeek-V3), MXFP4 (gpt-oss).

Both keep a scale for each block of numbers in a tensor of its own. Only what is asked for is widened, so that a model
is never in memory twice. The run computes with the widened weights; activations are not rounded to FP8.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.model.checkpoint_files import FLOAT_DTYPES, TensorHeader, WeightFiles, checkpoint_error
from harness.model.families.reading import ConfigReader, bad_entry

SCALE = "_scale_inv"  # behind the name of an FP8 tensor: the numbers by which its blocks are multiplied
BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of an MXFP4 tensor
GROUP = 32  # MXFP4 numbers with one scale: OCP Microscaling Formats 1.0, §5.4
# E2M1 by its four bits, the sign first: OCP Microscaling Formats 1.0, §5.3.3
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Weights(Protocol):
    """The tensors of a checkpoint, by the names and in the shapes that families ask for."""

    def names(self) -> list[str]: ...

    def files(self) -> dict[Path, os.stat_result]: ...

    def header(self, name: str) -> TensorHeader:
        """Return shape and stored dtype without touching the data. Raises `ConfigError` naming a tensor at fault."""
        ...

    def tensor(self, name: str) -> Any:
        """Return a tensor, or what has a `shape` and gives a tensor for an index, as numbers of the model."""
        ...

    def samples(self, name: str) -> list[float]:
        """Return the first values of what a tensor comes from, as they are stored."""
        ...


def weights_in(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Open the files of a folder as the `quantization_config` of its config.json says. Raises `ConfigError` naming the
    entry that is not supported."""
    files, entry = WeightFiles(folder), config.get("quantization_config")
    if not entry:
        return files
    if not isinstance(entry, Mapping):
        raise bad_entry("quantization_config", f"must be a mapping, got {entry!r}")
    method = entry.get("quant_method")
    if method == "fp8":
        return Fp8Weights(files, _fp8_block(entry))
    if method == "mxfp4":
        _refuse_others(entry, ())
        return Mxfp4Weights(files)
    raise bad_entry("quantization_config.quant_method", f"must be fp8 or mxfp4, got {method!r}")


def _fp8_block(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of a block."""
    _refuse_others(entry, ("fmt", "activation_scheme", "weight_block_size", "scale_fmt"))
    read = ConfigReader({f"quantization_config.{key}": value for key, value in entry.items()})
    read.must_equal("quantization_config.fmt", "e4m3")
    read.must_equal("quantization_config.activation_scheme", "dynamic")
    block = entry.get("weight_block_size")
    sizes = isinstance(block, list) and all(type(size) is int and size > 0 for size in block)
    if not isinstance(block, list) or not sizes or len(block) != 2:
        raise bad_entry("quantization_config.weight_block_size", f"must be two positive integers, got {block!r}")
    return block[0], block[1]


def _refuse_others(entry: Mapping[str, Any], known: tuple[str, ...]) -> None:
    harmless = ("quant_method", "modules_to_not_convert", "dequantize")  # the files say which tensors are converted
    for key in entry:
        if key not in (*known, *harmless):
            raise bad_entry(f"quantization_config.{key}", "unknown; the weights cannot be read without knowing it")


class Fp8Weights:
    """A checkpoint with matrices in FP8 (E4M3), which have one float scale for each block of rows and columns."""

    def __init__(self, files: WeightFiles, block: tuple[int, int]) -> None:
        self._files, self._block = files, block
        self.files = files.files

    def names(self) -> list[str]:
        return [name for name in self._files.names() if not name.endswith(SCALE)]

    def samples(self, name: str) -> list[float]:
        scales = self._files.samples(name + SCALE) if self.header(name).dtype == "F8_E4M3" else []
        return [*self._files.samples(name), *scales]

    def header(self, name: str) -> TensorHeader:
        found = self._files.header(name, (*FLOAT_DTYPES, "F8_E4M3"))
        if found.dtype == "F8_E4M3":
            if len(found.shape) != 2:
                raise checkpoint_error(name, f"must be a matrix, as it is in FP8, got {found.shape}")
            grid = tuple(-(-size // block) for size, block in zip(found.shape, self._block, strict=True))
            scales = self._files.header(name + SCALE).shape
            if scales != grid:
                raise checkpoint_error(name + SCALE, f"shape must be {grid}, one scale a block, got {scales}")
        return found

    def tensor(self, name: str) -> Any:
        if self.header(name).dtype != "F8_E4M3":
            return self._files.tensor(name)
        return _Fp8Matrix(self._files.tensor(name), self._files.tensor(name + SCALE), self._block)


class _Fp8Matrix:
    def __init__(self, numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        self._numbers, self._scales, self._block = numbers, scales, block
        self.shape = numbers.shape

    def __getitem__(self, at: tuple[slice, ...]) -> Tensor:
        """Return rows and columns in float32."""
        rows, columns = (*at, slice(None), slice(None))[:2]
        row_blocks, column_blocks = (
            torch.arange(size)[entry] // block
            for size, entry, block in zip(self.shape, (rows, columns), self._block, strict=True)
        )
        wide = self._numbers[rows, columns].float()
        scales = self._scales.float()[:, column_blocks]  # [blocks, columns]
        first = 0
        for index, count in zip(*row_blocks.unique_consecutive(return_counts=True), strict=True):
            wide[first : first + int(count)] *= scales[index]
            first += int(count)
        return wide


class Mxfp4Weights:
    """A checkpoint with the experts' matrices in MXFP4, as gpt-oss has them: rows of outputs, and two numbers a byte.
    Their names are those of gpt-oss in bfloat16, and so are their shapes: [experts, inputs, outputs]."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self.files = files.files
        present = set(files.names())
        self._packed = {name.removesuffix(BLOCKS) for name in present if name.endswith(BLOCKS)}
        self._plain = present - {name + end for name in self._packed for end in (BLOCKS, SCALES)}

    def names(self) -> list[str]:
        return sorted(self._plain | self._packed)

    def samples(self, name: str) -> list[float]:
        stored = [name + BLOCKS, name + SCALES] if name in self._packed else [name]
        return [value for each in stored for value in self._files.samples(each)]

    def header(self, name: str) -> TensorHeader:
        if name not in self._packed:
            return self._files.header(name)
        blocks, scales = (self._files.header(name + end, ("U8",)).shape for end in (BLOCKS, SCALES))
        if len(blocks) != 4 or blocks[-1] != GROUP // 2 or scales != blocks[:-1]:
            expected = f"shape must be [experts, outputs, groups, {GROUP // 2}], with scales alike but for the last"
            raise checkpoint_error(name + BLOCKS, f"{expected}, got {blocks} and {scales}")
        experts, outputs, groups, _ = blocks
        return TensorHeader((experts, groups * GROUP, outputs), "MXFP4")

    def tensor(self, name: str) -> Any:
        if name not in self._packed:
            return self._files.tensor(name)
        return _Mxfp4Experts(self._files.tensor(name + BLOCKS), self._files.tensor(name + SCALES))


class _Mxfp4Experts:
    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        self._blocks = blocks  # uint8 [experts, outputs, groups, 16]
        self._scales = scales  # uint8 [experts, outputs, groups]
        experts, outputs, groups, _ = blocks.shape
        self.shape = torch.Size((experts, groups * GROUP, outputs))

    def __getitem__(self, at: tuple[int | slice, ...]) -> Tensor:
        """Return a part of [experts, inputs, outputs] in float32. Of the outputs, only those asked for are widened."""
        experts, inputs, outputs = (*at, slice(None), slice(None), slice(None))[:3]
        blocks, scales = (x[experts][..., outputs, :, :] for x in (self._blocks, self._scales[..., None]))
        numbers = _pairs()[blocks.int().flatten()].view(*blocks.shape[:-1], GROUP)
        numbers = torch.ldexp(numbers, scales.int() - 127)  # E8M0: a power of two, biased by 127
        return numbers.flatten(-2).transpose(-1, -2)[..., inputs, :]


def _pairs() -> Tensor:
    """Return the two numbers of each byte, float32 [256, 2]: the low half of a byte comes first."""
    values = torch.tensor(FP4_VALUES)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
