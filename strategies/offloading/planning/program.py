"""State the policies of one A_g, one F_g and a range of micro-batch sizes as a mixed-integer program, and divide it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from strategies.offloading.planning.cost import LayerTime
from strategies.offloading.planning.linear_terms import BATCH, Linear
from strategies.offloading.planning.memory import KV_CACHE, Switches, demands
from strategies.offloading.planning.policy import Policy
from strategies.offloading.planning.solver import Rows, least
from strategies.offloading.planning.task import Search

MARGIN = 1e-6  # of a tier's capacity: larger than the solver's tolerance
_NUM_UNKNOWNS = 4  # those of `Linear.coefficients`
_FRACTION = 1e-6  # from here on a number is not whole: larger than the solver's tolerance
_WIDE = 4  # times the smallest size or more: the relaxation of a range with such sizes says little
_MANY_LIMITS = 12  # in a program of one size: from here on the solver divides by itself


@dataclass(frozen=True)
class Program:
    """A mixed-integer program looks for the best policy of one A_g, one F_g and a range of mu.

    The unknowns are N, micro-batches, r_w, r_c N, T, and the seconds of each task with several roofs.
    """

    task: Search
    gpu_attention: bool
    gpu_ffn: bool
    smallest: int
    largest: int
    limits: tuple[tuple[int, float, float], ...] = ()  # column, least and most; a later one is the narrower

    def narrowed(self) -> Program | None:
        """Return this program without the sizes that its limits rule out; None where they rule out all."""
        (smallest, largest), low, high = self._box
        if smallest > largest or any(low > high):
            return None
        is_same = (smallest, largest) == (self.smallest, self.largest)
        return self if is_same else replace(self, smallest=smallest, largest=largest)

    def relaxed(self, rate: float) -> Any | None:
        """Return the unknowns with which the relaxed program reaches a higher rate; None where it does not."""
        whole = self.smallest == self.largest and len(self.limits) >= _MANY_LIMITS
        solution = self._solve(self._gain(rate), integer=whole)
        return solution if solution is not None and float(solution @ self._gain(rate)) < 0 else None

    def parts(self, relaxed: Any) -> tuple[Program, ...]:
        """Return two programs in place of this one, divided at a fraction in its relaxed solution or by sizes.

        Returns none where there is neither.
        """
        if self.largest > _WIDE * self.smallest:
            return self._halves()
        for column in (2, 1, 0) if self._has_steps else (1, 0):
            number, low, high = (float(row[column]) for row in (relaxed, *self._bounds))
            below = np.floor(number)
            if abs(number - round(number)) > _FRACTION and low <= below < high:
                return self._limited(column, low, below), self._limited(column, below + 1, high)
        return self._halves() if self.smallest < self.largest else ()

    def _limited(self, column: int, least: float, most: float) -> Program:
        """Return this program with a limit more. All but its bounds is as here, and need not be made again."""
        limited = replace(self, limits=(*self.limits, (column, least, most)))
        kept = ("switches", "_layer", "_unit_s", "_num_columns", "_rows")  # what has been computed of these
        vars(limited).update({name: vars(self)[name] for name in kept if name in vars(self)})
        return limited

    def _halves(self) -> tuple[Program, ...]:
        middle = (self.smallest + self.largest) // 2
        return replace(self, largest=middle), replace(self, smallest=middle + 1)

    def policy_at(self, rate: float) -> Policy | None:
        """Return the policy that maximises N - rate T; None where nothing fits."""
        solution = self._solve(self._gain(rate), integer=True)
        return None if solution is None else self.policy_of(solution)

    def fastest(self, known_rate: float) -> tuple[Policy, float]:
        """Return the policy with the best rate, and that rate, by Dinkelbach's method from a rate that it beats."""
        rate = known_rate
        while True:
            policy = self.policy_at(rate)
            assert policy is not None, "the best program has a policy"
            reached = self.task.rate(policy)
            if reached <= rate * (1 + 1e-9):
                return policy, rate
            rate = reached

    def smallest_at(self, rate: float, *, fewest: int) -> Policy | None:
        """Return the policy with the fewest sequences, from `fewest` on, that still reaches `rate`.

        A tie goes to the most weights on the device, and then to the fewest sequences with their KV cache there.
        Returns None where nothing fits.
        """
        few = 0.25 / self.task.most_sequences
        objective = self._row(Linear(batch=1.0, resident_weights=-0.5, device_sequences=few))
        more = Rows.of([(-self._gain(rate), 0.0, np.inf), (self._row(BATCH), fewest, np.inf)])
        solution = self._solve(objective, integer=True, more=more)
        return None if solution is None else self.policy_of(solution)

    @cached_property
    def switches(self) -> Switches:
        return Switches(micro_batch_size=self.smallest, gpu_attention=self.gpu_attention, gpu_ffn=self.gpu_ffn)

    @cached_property
    def _layer(self) -> LayerTime:
        return self.task.layer_time(self.switches)

    @cached_property
    def _unit_s(self) -> float:
        """The unit to which seconds are scaled: what one sequence in one micro-batch takes. Near it the solver's
        tolerances hold."""
        one = Policy(
            batch_size=1,
            micro_batch_size=1,
            gpu_attention=self.gpu_attention,
            gpu_ffn=self.gpu_ffn,
            resident_weights=0.0,
            resident_kv=0.0,
        )
        return self._layer.seconds(one)

    def _gain(self, rate: float) -> Any:
        """Return the row of rate T - N, which is to be minimised."""
        row = self._row(Linear(batch=-1.0))
        row[_NUM_UNKNOWNS] = rate * self._unit_s
        return row

    @cached_property
    def _num_columns(self) -> int:
        return _NUM_UNKNOWNS + 1 + sum(len(task.roofs) > 1 for task in chain(*self._layer.resources.values()))

    def _row(self, term: Linear) -> Any:
        row = np.zeros(self._num_columns)
        row[:_NUM_UNKNOWNS] = term.coefficients
        row[2] *= self._step
        return row

    @cached_property
    def _step(self) -> float:
        """The share that the unknown for r_w counts in: the pipeline's smallest, or the whole where any share will do.

        The pipeline keeps all or nothing of what is no expert.
        """
        step = self.task.deployment.storage.resident_step
        return step if step is not None and self._has_steps and self.gpu_ffn else 1.0

    @cached_property
    def _has_steps(self) -> bool:
        return self.task.given.resident_weights is None and self.task.deployment.storage.resident_step is not None

    def policy_of(self, solution: Any) -> Policy:
        batch, _, steps, on_device = solution[:_NUM_UNKNOWNS]
        given = self.task.given
        resident = (round(steps) if self._has_steps else steps) * self._step
        size = round(batch)
        kv = given.resident_kv if given.resident_kv is not None else min(max(float(on_device) / size, 0.0), 1.0)
        weights = given.resident_weights if given.resident_weights is not None else min(max(float(resident), 0.0), 1.0)
        return Policy(
            batch_size=size,
            micro_batch_size=self.smallest,
            gpu_attention=self.gpu_attention,
            gpu_ffn=self.gpu_ffn,
            resident_weights=weights,
            resident_kv=kv,
        )

    def _solve(self, objective: Any, *, integer: bool, more: Rows | None = None) -> Any | None:
        """Return the unknowns that minimise `objective`; None where nothing fits."""
        whole = None
        if integer:
            whole = np.zeros(self._num_columns)
            whole[:2] = 1
            whole[2] = self._has_steps
        return least(objective, self._rows if more is None else self._rows + more, *self._bounds, whole)

    @cached_property
    def _bounds(self) -> tuple[Any, Any]:
        """The least and the most of all unknowns."""
        _, low, high = self._box
        others = self._num_columns - _NUM_UNKNOWNS
        return np.append(low, np.zeros(others)), np.append(high, np.full(others, np.inf))

    @cached_property
    def _box(self) -> tuple[tuple[int, int], Any, Any]:
        """The sizes that are left for a micro-batch, and the least and the most of a policy's unknowns.

        N, the number of micro-batches and their size narrow each other: all micro-batches but the last one are full.
        """
        task, share = self.task, self.task.given.resident_weights
        steps = (0.0, int(1 / self._step + 1e-9)) if share is None else (share, share)
        most = task.most_sequences
        low = np.array([task.given.batch_size or 1, task.fewest_micro_batches, steps[0], 0.0])
        high = np.array([most, task.max_micro_batches or most, steps[1], most])
        for column, least_of_it, most_of_it in self.limits:
            low[column], high[column] = least_of_it, most_of_it
        low[0] = max(low[0], self.smallest, (low[1] - 1) * self.smallest + 1)
        high[0] = min(high[0], high[1] * self.largest)
        low[1] = max(low[1], -(-low[0] // self.largest))
        high[1] = min(high[1], (high[0] - 1) // self.smallest + 1)
        smallest = max(self.smallest, int(-(-low[0] // high[1])))
        largest = min(self.largest, int(high[0] if low[1] == 1 else (high[0] - 1) // (low[1] - 1)))
        return (smallest, largest), low, high

    @cached_property
    def _rows(self) -> Rows:
        return Rows.of([*self._shape_rows(), *self._memory_rows(), *self._time_rows()])

    def _shape_rows(self) -> Iterator[tuple[Any, float, float]]:
        """Yield rows that keep micro-batches full but for the last one, and r_c N at most at N."""
        yield self._row(Linear(batch=1.0, micro_batches=-self.largest)), -np.inf, 0.0
        yield self._row(Linear(batch=1.0, micro_batches=-self.smallest)), 1.0 - self.smallest, np.inf
        yield self._row(Linear(batch=-1.0, device_sequences=1.0)), -np.inf, 0.0
        share = self.task.given.resident_kv
        if share is not None:
            yield self._row(Linear(batch=-share, device_sequences=1.0)), 0.0, 0.0

    def _memory_rows(self) -> Iterator[tuple[Any, float, float]]:
        """Yield rows that keep the policy within each limit, short of it by the solver's margin.

        A cache of which the device has no share needs no margin: its whole sequences can be counted, and one that fits
        exactly is not lost.
        """
        limits = self.task.deployment.limits_bytes
        for tier, pools in demands(self.task.deployment, self.switches).items():
            if tier not in limits:
                continue
            term, scale = sum(pools.values(), Linear()), max(limits[tier], 1)
            if tier == KV_CACHE and self.task.given.resident_kv == 0:
                yield self._row(BATCH), -np.inf, limits[tier] // term.batch
            else:
                yield self._row(term) / scale, -np.inf, (limits[tier] * (1 - MARGIN) - term.constant) / scale

    def _time_rows(self) -> Iterator[tuple[Any, float, float]]:
        column = _NUM_UNKNOWNS
        for tasks in self._layer.resources.values():
            alone, several = Linear(), []  # tasks with one roof and columns of the others
            for task in tasks:
                if len(task.roofs) == 1:
                    alone += next(iter(task.roofs.values()))
                    continue
                column += 1
                several.append(column)
                for roof in task.roofs.values():  # Eq. 14
                    row = self._row(-roof) / self._unit_s
                    row[column] = 1.0
                    yield row, roof.constant / self._unit_s, np.inf
            total = self._row(-alone) / self._unit_s
            total[_NUM_UNKNOWNS], total[several] = 1.0, -1.0
            yield total, alone.constant / self._unit_s, np.inf  # Eq. 12 and 13
