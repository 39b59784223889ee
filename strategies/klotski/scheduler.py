"""Cut the sequences of a pass into batches that go through each layer together. Torch-free."""

from __future__ import annotations

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence
from harness.engine.strategy import Scheduler


class InBatches:
    """Asks another scheduler, and deals the sequences of its passes out to `num_batches` batches."""

    def __init__(self, scheduler: Scheduler, num_batches: int) -> None:
        self._scheduler, self._num_batches = scheduler, num_batches

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def next_pass(self) -> PassPlan | None:
        plan = self._scheduler.next_pass()
        if plan is not None:
            dealt = [plan.sequences[number :: self._num_batches] for number in range(self._num_batches)]
            plan.micro_batches = [sequences for sequences in dealt if sequences]
        return plan

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        self._scheduler.retire(plan, ended)
