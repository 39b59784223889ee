"""A model without weights serves machines that only time it: it has the bytes of its parts, and no tensors.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.model import families
from harness.model.checkpoint_files import read_json
from harness.model.components import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    HEAD,
    NORMS,
    ROUTER,
    SHARED_EXPERTS,
)
from harness.model.config import RANDOM, ModelConfig
from harness.model.families.reading import read_spec
from harness.model.layout import PartLayout
from harness.model.sharding import shard_spec
from harness.model.spec import ModelSpec


class PlannedLayout:
    """The parts of any model by size: attention_in, attention_out, then the experts, as a family with weights has them.

    Shared experts lie in attention_out, and so does the MLP of a dense layer, which has no experts. Attention sinks
    count in attention_in; a family keeps them as a part of their own.
    """

    @staticmethod
    @lru_cache(maxsize=1024)
    def layer_parts(spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
        parts = spec.components
        attention, norms = parts[ATTENTION], parts[NORMS].nbytes
        out_bytes = round(attention.matrix_bytes * spec.attention_out_params / attention.matrix_params)
        out_bytes += spec.hidden_dim * spec.dtype_bytes if spec.o_bias else 0
        common = (DENSE_MLP,) if spec.is_dense(layer) else (ROUTER, SHARED_EXPERTS)
        behind_bytes = out_bytes + norms // 2 + sum(parts[name].nbytes for name in common if parts[name].count)
        behind_bytes += spec.value_up_bytes
        front_bytes = attention.nbytes - out_bytes + norms - norms // 2
        experts = range(0 if spec.is_dense(layer) else spec.num_experts)
        return (
            PartLayout("attention_in", (), front_bytes),
            PartLayout("attention_out", (), behind_bytes),
            *(PartLayout(f"expert.{e}", (), parts[EXPERT].nbytes, e) for e in experts),
        )

    @staticmethod
    def attention_part(spec: ModelSpec, layer: int) -> PartLayout | None:
        return None

    @staticmethod
    def embedding_part(spec: ModelSpec) -> PartLayout:
        return PartLayout("embedding", (), spec.components[EMBEDDING].nbytes)

    @staticmethod
    def head_part(spec: ModelSpec) -> PartLayout:
        """Return the head; a tied one lies with the embedding."""
        head = spec.components[HEAD]
        return PartLayout("head", (), head.nbytes * head.count + spec.components[FINAL_NORM].nbytes)


@dataclass(frozen=True)
class PlannedModel:
    """A `WeightStore` can use this instead of a checkpoint: it has the sizes of parts, and no weights."""

    spec: ModelSpec
    family: Any = PlannedLayout

    def shard(self, rank: int, num_ranks: int) -> PlannedModel:
        """Return the share of GPU `rank` of `num_ranks`. Raises ConfigError where the model cannot be divided."""
        return replace(self, spec=shard_spec(self.spec, num_ranks))

    def read_part(self, layer: int | None, part: PartLayout, out: Any) -> None:
        raise AssertionError("a planned model has no weights to read")


def planned_model(config: ModelConfig) -> PlannedModel:
    """Return the model of the config.json of `model.path`, which must exist where it is given. Without a path (or with
    `random`), or if its family is unknown and `model.spec` is given, it is the model of `model.spec`, or of the recipe
    of a random checkpoint. Raises ConfigError."""
    found = _planned(config)
    return replace(found, spec=config.chosen(found.spec))


def _planned(config: ModelConfig) -> PlannedModel:
    if config.path not in (None, RANDOM):
        folder = Path(str(config.path)).expanduser()
        if not folder.is_dir():
            message = f"{config.path}: no such folder; without weights a plan needs none (leave it out), or a local one"
            raise ConfigError("model.path", message)
        entries = read_json(folder / "config.json")
        family = str(entries.get("model_type"))
        if family in families.available() or config.spec is None:
            found, own = families.layout(family), entries.get("dtype", entries.get("torch_dtype"))
            spec, _ = read_spec(found, entries, config.name, config.dtype or own or "bfloat16")
            return PlannedModel(spec, found)
    if config.spec is not None:
        return PlannedModel(ModelSpec.from_config(config.spec, config.name, config.dtype))
    if config.recipe is not None:
        layout = families.layout(config.recipe.family)
        entries = layout.config_from_recipe(config.recipe)
        return PlannedModel(layout.spec_from_config(entries, config.name, config.dtype or config.recipe.dtype), layout)
    raise ConfigError("model.spec", f"missing: machine=simulated needs the dimensions of {config.name!r}")
