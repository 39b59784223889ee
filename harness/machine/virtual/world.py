"""Tell the simulated machine what it needs besides lanes and clock: costs from a profile, and the values ops bring
back.

Costs come from the profile's achieved rates (each with its source) or from tables measured on a machine, never from a
strategy's performance model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from harness.config import ConfigError
from harness.hardware.profile import HardwareConfig
from harness.machine.base import LaneKind
from harness.machine.virtual.costs import ATTENTION_ON_HOST, LaneCost, Roofline
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.engine.batch import MicroBatch
    from harness.routing.base import Predictor, Routing


_REMEMBERED = 64  # micro-batches times layers, of which a strategy has few in the making at any time
_REMEMBERED_CHOICES = 1 << 22  # of tokens: 32 MB


class World:
    """The world answers as a model would: routing from a counter-based source, token 0 for every sample.

    Beforehand it says of the routing what a predictor says: nothing, without one.
    """

    def __init__(self, routing: Routing, num_experts: int, predictor: Predictor | None = None) -> None:
        self._routing = routing
        self._num_experts = num_experts
        self._predictor = predictor
        self.was_asked_to_predict = False
        self._drawn: dict[tuple[MicroBatch, int], np.ndarray] = {}
        self._counts: dict[tuple[MicroBatch, int], np.ndarray] = {}
        self._num_choices = 0  # in `_drawn`
        self._seen: WeakKeyDictionary[MicroBatch, set[int]] = WeakKeyDictionary()  # layers, by micro-batch

    @property
    def source(self) -> str:
        """The origin of the routing, for labels."""
        return self._routing.source

    @property
    def prediction_source(self) -> str:
        """The origin of the predictions, for labels."""
        return "none stated or recorded" if self._predictor is None else self._predictor.source

    @property
    def predicts(self) -> bool:
        """Tell whether predictions were stated, or recorded with the routing."""
        return self._predictor is not None

    def num_shared(self, request_ids: np.ndarray, others: np.ndarray) -> int:
        """Return how many requests have the routing of one of the others: some where a trace has no more."""
        return self._routing.num_shared(request_ids, others)

    def sampled(self, batch: MicroBatch) -> np.ndarray:
        """Return token 0 for each sequence, int64 [sequences]: the simulated machine only times a run."""
        return np.zeros(batch.num_sequences, dtype=np.int64)

    def routing(self, batch: MicroBatch, layer: int) -> np.ndarray:
        """Return the experts that the router chooses for each token: int64 [tokens, experts_per_token], read-only."""
        key = (batch, layer)
        if (drawn := self._drawn.get(key)) is None:
            drawn = self._routing.experts(batch.request_ids, batch.positions, layer)
            drawn.setflags(write=False)  # all who ask get the same array
            self._num_choices += drawn.size
            self._drawn[key] = drawn
            while len(self._drawn) > 1 and (len(self._drawn) > _REMEMBERED or self._num_choices > _REMEMBERED_CHOICES):
                self._num_choices -= self._drawn.pop(next(iter(self._drawn))).size
        return drawn

    def route(self, batch: MicroBatch, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Show a strategy the routing by which it chooses experts, and remember that it has seen it.

        Returns `routing` and the weights of these experts, float32 [tokens, experts_per_token] and read-only: equal
        ones, since no cost depends on them.
        """
        chosen = self.routing(batch, layer)
        self._seen.setdefault(batch, set()).add(layer)
        return chosen, np.broadcast_to(np.float32(1 / max(chosen.shape[1], 1)), chosen.shape)

    def predicted(self, batch: MicroBatch, layer: int, distance: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return which experts of `layer` are predicted for each token, and how likely each is.

        Both [tokens, predicted], int64 and float64: what is known once layer `layer - distance` has been computed. It
        is right as often as was stated, no more.
        """
        self.was_asked_to_predict = True
        if self._predictor is None:
            return np.empty((batch.num_tokens, 0), dtype=np.int64), np.empty((batch.num_tokens, 0))
        chosen = partial(self.routing, batch, layer)
        return self._predictor.experts(batch.request_ids, batch.positions, layer, distance, chosen)

    def expert_counts(self, batch: MicroBatch, layer: int) -> np.ndarray | None:
        """Return int64 [num_experts], the tokens that choose each expert.

        None where routing is even and nobody has seen it: the expected numbers, which every op knows by itself, are
        then as good.
        """
        if self._routing.is_even and layer not in self._seen.get(batch, ()):
            return None
        key = (batch, layer)
        if (counts := self._counts.get(key)) is None:
            counts = np.bincount(self.routing(batch, layer).ravel(), minlength=self._num_experts)
            if len(self._counts) >= _REMEMBERED:
                del self._counts[next(iter(self._counts))]
            self._counts[key] = counts
        return counts


LATENT_SHARE = 0.5  # of the rate of matrix products that latent_attention reached: docs/kernels.md, "Latent attention"


def profile_costs(hardware: HardwareConfig, spec: ModelSpec) -> Roofline:
    """Make a roofline for each lane from the profile's achieved rates, and one for attention on the CPU.

    That may be another kernel's; over latents it is arithmetic, at a rate that is not that of matrix products.
    """

    def rate(name: str, unit: float = 1e9) -> float:
        value = getattr(hardware, name)
        if value is None:
            raise _unstated(hardware, name)
        return float(value) * unit

    latency_s = (hardware.transfer_latency_us or 0.0) * 1e-6
    cpu_op_s = (hardware.cpu_op_us or 0.0) * 1e-6
    roofline = Roofline(
        lanes={
            LaneKind.GPU: LaneCost(
                overhead_s=(hardware.kernel_launch_us or 0.0) * 1e-6,
                flops_s=hardware.gemm_flop_s(spec.dtype),
                device_bytes_s=rate("device_gb_s"),
                link_bytes_s=rate("p2p_gb_s") if hardware.num_gpus > 1 else float("inf"),
            ),
            # cpu_gflop_s is what attention was seen to reach where memory limits it: no limit of its own.
            LaneKind.CPU: LaneCost(
                overhead_s=cpu_op_s, flops_s=rate("cpu_gemm_gflop_s"), host_bytes_s=rate("cpu_gb_s")
            ),
            LaneKind.H2D: LaneCost(overhead_s=latency_s, link_bytes_s=rate("h2d_gb_s")),
            LaneKind.D2H: LaneCost(overhead_s=latency_s, link_bytes_s=rate("d2h_gb_s")),
            LaneKind.PIN: LaneCost(link_bytes_s=rate("staging_gb_s")),
        }
    )
    own_rate = "cpu_gb_s" if hardware.cpu_attention_gb_s is None else "cpu_attention_gb_s"
    attention = replace(roofline.lanes[LaneKind.CPU], host_bytes_s=rate(own_rate))
    if spec.latent is not None:
        latent_flops_s = LATENT_SHARE * rate("cpu_gemm_gflop_s")
        if hardware.cpu_latent_gflop_s is not None:
            latent_flops_s = rate("cpu_latent_gflop_s")
        attention = replace(attention, flops_s=latent_flops_s)
    return replace(roofline, ops={(LaneKind.CPU, ATTENTION_ON_HOST): attention})


def host_bytes_s(hardware: HardwareConfig) -> float:
    """Return the bandwidth of host memory that all lanes share."""
    value = hardware.host_gb_s
    if value is None:
        raise _unstated(hardware, "host_gb_s")
    return float(value) * 1e9


def _unstated(hardware: HardwareConfig, name: str) -> ConfigError:
    others = "take a real machine's, such as hardware=a40, or hardware=local for this computer as measured"
    message = f"profile {hardware.name!r} states none; machine=simulated needs it: {others}"
    return ConfigError(f"hardware.{name}", message)
