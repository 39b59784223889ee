"""The task of a policy search says what policies cost, what of them is given, and what a pipeline takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from strategies.offloading.planning.cost import CostModel, LayerTime
from strategies.offloading.planning.memory import Deployment, Switches, fits
from strategies.offloading.planning.policy import GivenPolicy, Policy


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search is for the best policy by a cost model. `given` fixes parts of the policy; the pipeline limits the
    number of micro-batches. Of equally good policies one with a smaller batch is taken; `keeps_num_batches`: if the
    workload takes no more of them."""

    cost: CostModel
    given: GivenPolicy = field(default_factory=GivenPolicy)
    min_micro_batches: int = 1  # CGOPipe takes turns between two or more; fewer where there are fewer requests
    max_micro_batches: int | None = None
    keeps_num_batches: bool = True

    @property
    def deployment(self) -> Deployment:
        return self.cost.deployment

    @cached_property
    def most_sequences(self) -> int:
        """The most sequences of a batch: no batch is larger than the workload, unless it is given."""
        return self.given.batch_size or self.whole_workload

    @property
    def whole_workload(self) -> int:
        """The sequences of a batch with all requests, or with as many as the least number of micro-batches needs."""
        num_requests, size = self.deployment.shape.num_requests, self.given.micro_batch_size
        fewest = 1 if size is None else (min(self.min_micro_batches, max(num_requests, size)) - 1) * size + 1
        return max(num_requests, fewest, size or 1)

    @property
    def fewest_micro_batches(self) -> int:
        return min(self.min_micro_batches, self.most_sequences)

    def layer_time(self, switches: Switches) -> LayerTime:
        """Return the time that is minimised: a layer of a decode step, or of the prefill where nothing else is
        generated."""
        return self.cost.decode(switches) if self.deployment.shape.new_tokens > 1 else self.cost.prefill(switches)

    def rate(self, policy: Policy) -> float:
        """Return N / T, the sequences per second of a layer."""
        return policy.batch_size / self.layer_time(Switches.of(policy)).seconds(policy)

    def switches(self) -> Iterator[tuple[bool, bool]]:
        """Return the values of (A_g, F_g) that are open."""
        return product(_open(self.given.gpu_attention), _open(self.given.gpu_ffn))

    def allows(self, policy: Policy) -> bool:
        """Tell whether the policy agrees with what is given, and fits the pipeline and the memory."""
        given = {name: value for name, value in vars(self.given).items() if value is not None}
        most = self.max_micro_batches or policy.num_micro_batches
        return (
            all(abs(getattr(policy, name) - value) <= 1e-9 for name, value in given.items())
            and self.fewest_micro_batches <= policy.num_micro_batches <= most
            and policy.batch_size <= self.most_sequences
            and fits(self.deployment, policy)
        )


def _open(given: bool | None) -> list[bool]:
    return [False, True] if given is None else [given]
