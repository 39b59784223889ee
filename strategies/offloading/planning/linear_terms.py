"""Quantities that are linear in what a policy leaves open, once its micro-batch size and its two switches are fixed.

Memory and time are written in these terms once: evaluated for a given policy, they are bytes and seconds; as rows of a
mixed-integer program, they are the constraints of the policy search. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.offloading.planning.policy import Policy


@dataclass(frozen=True, slots=True)
class Linear:
    """The sum constant + batch N + micro_batches ceil(N / mu) + resident_weights r_w + device_sequences r_c N.

    The product r_c N, the sequences whose KV cache is on the device, is one unknown, so that everything stays linear.
    """

    constant: float = 0.0
    batch: float = 0.0
    micro_batches: float = 0.0
    resident_weights: float = 0.0
    device_sequences: float = 0.0

    def __add__(self, other: Linear | float) -> Linear:
        if not isinstance(other, Linear):
            other = Linear(other)
        return Linear(
            self.constant + other.constant,
            self.batch + other.batch,
            self.micro_batches + other.micro_batches,
            self.resident_weights + other.resident_weights,
            self.device_sequences + other.device_sequences,
        )

    __radd__ = __add__

    def __mul__(self, factor: float) -> Linear:
        return Linear(
            self.constant * factor,
            self.batch * factor,
            self.micro_batches * factor,
            self.resident_weights * factor,
            self.device_sequences * factor,
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Linear:
        return self * (1 / divisor)

    def __neg__(self) -> Linear:
        return self * -1.0

    def __sub__(self, other: Linear | float) -> Linear:
        return self + other * -1.0

    def __rsub__(self, other: float) -> Linear:
        return -self + other

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """The coefficients of N, the number of micro-batches, r_w and r_c N, in this order."""
        return self.batch, self.micro_batches, self.resident_weights, self.device_sequences

    def at(self, policy: Policy) -> float:
        unknowns = (
            policy.batch_size,
            policy.num_micro_batches,
            policy.resident_weights,
            policy.resident_kv * policy.batch_size,
        )
        return self.constant + sum(a * x for a, x in zip(self.coefficients, unknowns, strict=True))


BATCH = Linear(batch=1.0)
MICRO_BATCHES = Linear(micro_batches=1.0)
RESIDENT_WEIGHTS = Linear(resident_weights=1.0)
DEVICE_SEQUENCES = Linear(device_sequences=1.0)
