"""Decide how many steps a training has, and by which rate it learns in each. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import require


@dataclass
class Schedule:
    """A rate that rises to its peak, stays there, and falls to zero over the last `decay_percent` of the steps.

    Where minutes limit the training, the number of steps is open until the fall begins. From then on it is settled, so
    that a training by minutes can be repeated by its number of steps.
    """

    peak: float
    warmup_steps: int
    decay_percent: int
    minutes: float | None
    num_steps: int | None  # as asked for, until minutes settle fewer

    def settle(self, step: int, seconds: float) -> None:
        """Settle the number of steps, before step `step`, once minutes leave only the time for the fall."""
        if self.minutes is None or (self.num_steps is not None and step >= self._decay_from(self.num_steps)):
            return
        share = 100 - self.decay_percent
        if seconds >= self.minutes * 60 * share / 100:
            by_time = max(1, step * 100 // share)
            self.num_steps = by_time if self.num_steps is None else min(self.num_steps, by_time)

    def go_on(self, step: int, num_steps: int | None) -> None:
        """Go on before step `step` with a training of `num_steps` steps, whose number stands once its fall has begun.
        Raises ConfigError where another number was asked for."""
        if num_steps is None or step < self._decay_from(num_steps):
            return
        told = f"must be {num_steps} or null: the rate falls to zero by then already; got {self.num_steps}"
        require(self.num_steps is None or self.minutes is not None or self.num_steps == num_steps, "steps", told)
        self.num_steps = num_steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.num_steps is None:
            return self.peak * warm
        left = (self.num_steps - step) / (self.num_steps - self._decay_from(self.num_steps) + 1)
        return self.peak * min(warm, left)

    def is_over(self, step: int) -> bool:
        """Return whether no step is left."""
        return self.num_steps is not None and step >= self.num_steps

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done."""
        by_steps = step / self.num_steps if self.num_steps else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, by_steps or by_time)

    def _decay_from(self, num_steps: int) -> int:
        return -(-num_steps * (100 - self.decay_percent) // 100)
