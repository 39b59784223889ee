"""The settings of llama.cpp's split, and the device memory that the split needs for weights."""

from __future__ import annotations

from harness.config import config, require
from harness.engine.strategy import require_packet_mb
from harness.memory.placed import ModelParts

_MATRICES = 3  # gate, up and down: llama.cpp copies one of them at a time, of all experts of a layer


@config
class Config:
    """Each setting has an option of llama.cpp, which conf/strategy/llamacpp_split.yaml names, and its default."""

    packet_mb: float = 1.0
    cpu_moe_layers: int | None = None
    offload_min_tokens: int | None = 32
    slots: int = 4
    context_tokens: int | None = None
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        for name in ("slots", "batch_tokens", "micro_batch_tokens"):
            value = getattr(self, name)
            require(value >= 1, name, f"must be >= 1, got {value}")
        for name, least in (("cpu_moe_layers", 0), ("offload_min_tokens", 1), ("context_tokens", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, name, f"must be >= {least} or null, got {value}")

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return, by name, the device memory that weights take with the experts of all layers in host memory. Whether
        there is room for those that `cpu_moe_layers` leaves on the device is the planner's to say."""
        return DeviceWeights(model).bytes_with(model.spec.num_layers, copies=self.offload_min_tokens is not None)


class DeviceWeights:
    """Says what a model's layers take of device memory when the first of them leave their experts to the host."""

    def __init__(self, model: ModelParts) -> None:
        layouts = [model.family.layer_parts(model.spec, layer) for layer in range(model.spec.num_layers)]
        experts = [[part.nbytes for part in parts if part.expert is not None] for parts in layouts]
        self._dense_bytes = sum(part.nbytes for parts in layouts for part in parts if part.expert is None)
        self._experts_bytes = [sum(sizes) for sizes in experts]
        self.num_layers = len(layouts)
        self.copy_bytes = max((nbytes for sizes in experts for nbytes in sizes), default=0)  # of any expert
        self._num_experts = [len(sizes) for sizes in experts]

    def num_copies(self, cpu_moe_layers: int) -> int:
        """Return how many experts of these layers the device has room for, to compute a copy of them.

        llama.cpp keeps room for one of a layer's three matrices of all experts. Here an expert is in one piece, so as
        many bytes hold a third of the experts.
        """
        return -(-max(self._num_experts[:cpu_moe_layers], default=0) // _MATRICES)

    def bytes_with(self, cpu_moe_layers: int, *, copies: bool) -> dict[str, int]:
        """Return the bytes by name, with room for `copies` of the host's experts or without."""
        host_layers = min(cpu_moe_layers, self.num_layers)
        found = {"all layers without experts": self._dense_bytes}
        if resident_bytes := sum(self._experts_bytes[host_layers:]):
            found[f"experts of {self.num_layers - host_layers} layers"] = resident_bytes
        if copies and (num_copies := self.num_copies(host_layers)):
            found[f"copies of {num_copies} experts"] = num_copies * self.copy_bytes
        return found
