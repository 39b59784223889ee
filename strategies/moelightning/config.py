"""Settings of MoE-Lightning; each is an ablation switch."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config
from strategies.offloading.config import OffloadingConfig
from strategies.offloading.published.as_built import AsBuilt
from strategies.offloading.published.moelightning import AS_BUILT


@config
class Config(OffloadingConfig):
    """`staging` is section A.1 of the paper, `padding` its "(p)"."""

    parallelism: ClassVar[str] = "tensor"  # §4.3

    published: ClassVar[AsBuilt | None] = AS_BUILT

    paging: bool = True  # §4.1; false: a layer's weights as one block
    staging: bool | None = True
