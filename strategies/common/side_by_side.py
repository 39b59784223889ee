"""Let schedulers work side by side, one for each GPU.

Each has requests and KV blocks of its own, and their passes go through the model together. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence
from harness.engine.strategy import Scheduler


class SideBySide:
    """Joins what all schedulers want to do next into one pass; one that has ended leaves the others alone."""

    def __init__(self, schedulers: Seq[Scheduler]) -> None:
        self._schedulers = tuple(schedulers)
        self._plans: list[tuple[Scheduler, PassPlan]] = []

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self._schedulers)

    def next_pass(self) -> PassPlan | None:
        wanted = [(scheduler, scheduler.next_pass()) for scheduler in self._schedulers]
        self._plans = [(scheduler, plan) for scheduler, plan in wanted if plan is not None]
        plans = [plan for _, plan in self._plans]
        if not plans:
            return None
        modes = {plan.mode for plan in plans}
        return PassPlan(
            prefill=[s for plan in plans for s in plan.prefill],
            decode=[s for plan in plans for s in plan.decode],
            mode=modes.pop() if len(modes) == 1 else "mixed",
            num_preemptions=sum(plan.num_preemptions for plan in plans),
        )

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        for scheduler, its_plan in self._plans:
            scheduler.retire(its_plan, [s for s in its_plan.sequences if s in gone])
