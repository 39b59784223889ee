"""Read a Hugging Face checkpoint folder straight from its safetensors into parts of the host weight store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.config import ConfigError
from harness.model import families
from harness.model.checkpoint_files import FLOAT_DTYPES, checkpoint_error, read_json
from harness.model.families.reading import read_spec
from harness.model.hub import resolve_model
from harness.model.layout import PartLayout, TensorLayout
from harness.model.quantised import weights_in
from harness.model.quiet import quiet_transformers
from harness.model.sharding import shard_spec, shard_start
from harness.model.spec import DTYPE_NAMES, DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Checkpoint", "resolve_model"]


class Checkpoint:
    """A checkpoint has config.json, weights and tokenizer of one folder. Its attributes are `folder`, `family`, `spec`,
    `config`, and `entries_read`: the entries of `config` that `spec` comes from.

    `dtype` is what `read_part` delivers; None means the checkpoint's own. Opening reads headers, no weights.
    """

    def __init__(self, folder: Path, dtype: str | None = None) -> None:
        """Open and validate the folder. Raises `ConfigError("model.path", ...)` naming the file, entry or tensor at
        fault."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise checkpoint_error(str(self.folder), "no such folder")
        self.config = read_json(self.folder / "config.json")
        if "model_type" not in self.config:
            raise checkpoint_error(str(self.folder / "config.json"), "model_type: missing")
        self.family = families.family(str(self.config["model_type"]))
        self._weights = weights_in(self.folder, self.config)
        name = self.folder.name
        self.spec, self.entries_read = read_spec(self.family, self.config, name, dtype or self._own_dtype())
        self.validate()

    def _own_dtype(self) -> str:
        """Return the dtype that config.json names; without an entry, that of the first stored tensor that is not
        quantised."""
        own = self.config.get("dtype", self.config.get("torch_dtype"))
        if own is None:
            stored = (self._weights.header(name).dtype for name in self._weights.names())
            own = next((FLOAT_DTYPES[dtype] for dtype in stored if dtype in FLOAT_DTYPES), "float32")
        if own not in DTYPES:
            raise ConfigError("model.dtype", f"the checkpoint is stored as {own}: choose {DTYPE_NAMES}")
        return own

    def stored_dtypes(self) -> set[str]:
        """Return the dtypes of the model's tensors as they lie in the files."""
        stored = {self._weights.header(name).dtype for name in self._tensor_names()}
        return {FLOAT_DTYPES.get(dtype, dtype) for dtype in stored}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors by their names: views of the open files, but for those that are quantised, which
        are widened."""
        return {name: self._weights.tensor(name)[()] for name in self._tensor_names()}

    def _tensor_names(self) -> list[str]:
        return sorted({name for _, part in self.parts() for t in part.tensors for name in t.checkpoint_names})

    def parts(self) -> list[tuple[int | None, PartLayout]]:
        """Return every part of the model with its layer, None for embedding and head."""
        spec, family = self.spec, self.family
        layers = [(i, part) for i in range(spec.num_layers) for part in family.layer_parts(spec, i)]
        layers += [(i, part) for i in range(spec.num_layers) if (part := family.attention_part(spec, i))]
        return [(None, family.embedding_part(spec)), *layers, (None, family.head_part(spec))]

    @cached_property
    def _parts(self) -> dict[tuple[int | None, str], PartLayout]:
        return {(layer, part.name): part for layer, part in self.parts()}

    def validate(self) -> None:
        """Check presence, shape and dtype of every tensor of every part."""
        for _, part in self.parts():
            for tensor in part.tensors:
                self._validate_tensor(tensor)
        if self.spec.tie_embeddings:
            self._validate_tie()

    def _validate_tie(self) -> None:
        """Check that a head of its own, stored with tied embeddings, is the same matrix: otherwise transformers would
        not tie it."""
        tied = self.family.head_part(self.spec).tensors
        untied = self.family.head_part(replace(self.spec, tie_embeddings=False)).tensors
        for ours, own in zip(tied, untied, strict=True):
            for name, own_name in zip(ours.checkpoint_names, own.checkpoint_names, strict=True):
                present = own_name != name and own_name in self._weights.names()
                if present and not torch.equal(self._weights.tensor(name), self._weights.tensor(own_name)):
                    raise checkpoint_error(own_name, f"differs from {name}, though config.json has tie_word_embeddings")

    def _validate_tensor(self, tensor: TensorLayout) -> None:
        """Check that stacked checkpoint tensors agree in all dimensions but the first, which must add up."""
        shapes = []
        for name, piece in tensor.pieces:
            stored = self._weights.header(name).shape
            if (shape := piece.shape_of(stored)) is None:
                raise checkpoint_error(name, f"shape must reach {piece.index} by config.json, got {stored}")
            shapes.append(shape)
        rest = tensor.shape[1:]
        for name, shape in zip(tensor.checkpoint_names, shapes, strict=True):
            expected = f"{tensor.shape}" if len(shapes) == 1 else f"a share of {tensor.shape} along the first dimension"
            if not shape or shape[1:] != rest or (len(shapes) == 1 and shape != tensor.shape):
                raise checkpoint_error(name, f"shape must be {expected} by config.json, got {shape}")
        if sum(shape[0] for shape in shapes) != tensor.shape[0]:
            names, rows = ", ".join(tensor.checkpoint_names), [shape[0] for shape in shapes]
            raise checkpoint_error(names, f"must have {tensor.shape[0]} rows together by config.json, got {rows}")

    def shard(self, rank: int, num_ranks: int) -> CheckpointShard:
        """Return the shard of this checkpoint that GPU `rank` of `num_ranks` reads. Raises ConfigError where it cannot
        be divided."""
        return CheckpointShard(self, rank, num_ranks)

    def read_part(
        self, layer: int | None, part: PartLayout, out: torch.Tensor, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Copy the part's tensors to their offsets in `out`, uint8 [part.nbytes] on the CPU, converting the dtype.

        If the part is laid out for one of `num_ranks` GPUs, only the shard of `rank` is copied. Where the whole lies in
        the files is said by its own layout. No other copy is made.
        Raises `ConfigError` naming a tensor that holds NaN or infinity.
        """
        assert out.dtype == torch.uint8 and out.shape == (part.nbytes,), f"{part.name} of layer {layer}: {out.shape}"
        views = part_views(part, out)
        for tensor, whole in zip(part.tensors, self._parts[layer, part.name].tensors, strict=True):
            pieces = [piece.of(self._weights.tensor(name)) for name, piece in whole.pieces]
            num_rows = sum(piece.shape[0] for piece in pieces)
            in_proportion = [piece.shape[0] * tensor.shape[0] // num_rows for piece in pieces]
            slots = views[tensor.name].split(list(tensor.rows) or in_proportion)
            for name, piece, slot in zip(tensor.checkpoint_names, pieces, slots, strict=True):
                slot.copy_(_shard_of(piece, slot.shape, rank, num_ranks))
                if tensor.added_once and rank > 0:
                    slot.zero_()
                if not torch.stack(torch.aminmax(slot)).isfinite().all():
                    raise checkpoint_error(name, "corrupt: holds NaN or infinity")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the tokenizer from tokenizer.json alone, so that no code of the checkpoint ever runs."""
        from transformers import PreTrainedTokenizerFast

        if not (self.folder / "tokenizer.json").exists():
            how = "make one with transformers' TikTokenConverter" if self._has_tiktoken() else "save one there"
            raise checkpoint_error(str(self.folder / "tokenizer.json"), f"missing; a fast tokenizer is needed: {how}")
        try:
            with quiet_transformers():
                return PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # the tokenizers library raises bare Exception on a bad file
            raise checkpoint_error(str(self.folder / "tokenizer.json"), f"not readable ({error})") from None

    def _has_tiktoken(self) -> bool:
        """Return whether the folder has a vocabulary that only code of the checkpoint reads, as Moonlight's has."""
        return (self.folder / "tiktoken.model").exists()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self._tensor_names():
            digest.update(repr((name, self._weights.header(name), self._weights.samples(name))).encode())
        for path, opened in self._weights.files().items():
            digest.update(f"{path.name} {opened.st_size}".encode())
        return digest.hexdigest()[:16]

    def fingerprint(self) -> str:
        """Return 16 hex digits over config, tensor headers, the first values of each tensor, and file sizes: the same
        for a copy elsewhere. It does not notice an edit behind those first values; `version` does."""
        return self._fingerprint

    def version(self) -> str:
        """Return 16 hex digits over the fingerprint and the files' times of change when they were opened. They are the
        key for anything derived from the files."""
        times = [opened.st_mtime_ns for opened in self._weights.files().values()]
        return hashlib.sha256(repr((self._fingerprint, times)).encode()).hexdigest()[:16]


def part_views(part: PartLayout, region: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return typed views, by local tensor name, of a uint8 region [>= part.nbytes] that holds the part."""
    return {
        tensor.name: region[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.shape)
        for tensor in part.tensors
    }


class CheckpointShard:
    """The shard of a checkpoint that one of several GPUs has: a source of parts like the checkpoint itself."""

    def __init__(self, whole: Checkpoint, rank: int, num_ranks: int) -> None:
        self.spec = shard_spec(whole.spec, num_ranks)
        self.family = whole.family
        self._whole, self._rank, self._num_ranks = whole, rank, num_ranks

    def read_part(self, layer: int | None, part: PartLayout, out: torch.Tensor) -> None:
        self._whole.read_part(layer, part, out, rank=self._rank, num_ranks=self._num_ranks)


def _shard_of(piece: torch.Tensor, shape: torch.Size, rank: int, num_ranks: int) -> torch.Tensor:
    """Return a view of the part of `piece` that belongs to a rank, of the given shape."""
    for dim, (whole, mine) in enumerate(zip(piece.shape, shape, strict=True)):
        piece = piece.narrow(dim, shard_start(whole, mine, rank, num_ranks), mine)
    return piece
