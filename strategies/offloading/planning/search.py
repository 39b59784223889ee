"""MoE-Lightning's policy search (§4.2, §B.2) finds the policy that fits and has the most sequences per second of a
layer.

The paper minimises the per-layer latency T. This alone leads to a tiny batch, so here the largest N / T is sought. With
mu, A_g and F_g fixed, T and all memory are linear in N, the number of micro-batches, r_w and r_c N (`linear_terms`). So
each choice of mu, A_g and F_g is a mixed-integer program. Dinkelbach's method maximises its quotient: the largest N -
rate T is 0 exactly where the rate is the best one. Micro-batch sizes are searched by branch and bound: a range of them
is relaxed to its smallest size for memory and time, its largest for the number of micro-batches, and fractions where
whole numbers are asked for. A wide range is divided by sizes; a narrow one at such a fraction first, of an expert, a
micro-batch or a sequence. What is left has whole numbers without being asked for them, which takes a tenth of the time.
The powers of two are looked at beforehand, and sizes near the best of them: they give a rate that most ranges cannot
beat. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from harness.config import ConfigError
from harness.memory.tiers import enough, told_bytes
from strategies.offloading.planning.cost import CostModel, LayerTime
from strategies.offloading.planning.linear_terms import BATCH, Linear
from strategies.offloading.planning.memory import KV_CACHE, Deployment, Switches, demands, fits, held_bytes, shortfalls
from strategies.offloading.planning.policy import GivenPolicy, Policy

_NUM_UNKNOWNS = 4  # those of `Linear.coefficients`
_MARGIN = 1e-6  # of a tier's capacity: larger than the solver's tolerance
_WORTH_A_THOUGHT = 1e-6  # the search is exact to this share of the rate
_SAME_RATE = 1e-3  # policies this close in rate count as equal; the one with the fewest sequences is taken
_FRACTION = 1e-6  # from here on a number is not whole: larger than the solver's tolerance
_WIDE = 4  # times the smallest size or more: the relaxation of a range with such sizes says little
_SOLVER = {"mip_rel_gap": 0.0}
_INFEASIBLE = 2  # a status of `milp`


@dataclass(frozen=True, kw_only=True)
class Search:
    """The task of a search. `given` fixes parts of the policy; the pipeline limits the number of micro-batches."""

    cost: CostModel
    given: GivenPolicy = field(default_factory=GivenPolicy)
    min_micro_batches: int = 1  # CGOPipe takes turns between two or more; fewer where there are fewer requests
    max_micro_batches: int | None = None

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


def search(task: Search) -> Policy:
    """Return the policy of `better_policy` where none is known yet.

    Raises ConfigError naming what is too small where no policy fits.
    """
    found = better_policy(task, 0.0)
    if found is None:
        raise nothing_fits(task)
    return found


def better_policy(task: Search, known_rate: float) -> Policy | None:
    """Return the best policy, or one within 0.1 % of it that has a smaller batch; None if all that fit are known.

    The latter differs in N, r_w and r_c only, takes no more batches for the workload, and has the smallest batch of all
    such policies. Known are those that do not beat `known_rate` by more than is worth a thought.
    """
    best = _best_program(task, known_rate)
    if best is None:
        return None
    fastest, rate = best.fastest(known_rate)
    if rate <= known_rate:
        return None
    num_requests = max(task.deployment.shape.num_requests, 1)
    num_batches = -(-num_requests // fastest.batch_size)
    policy = best.smallest_at(rate * (1 - _SAME_RATE), fewest=min(-(-num_requests // num_batches), fastest.batch_size))
    assert policy is not None and task.allows(policy), f"the search left its constraints: {policy}"
    return policy


def _best_program(task: Search, known_rate: float) -> _Program | None:
    """Search ranges of micro-batch sizes depth first, larger sizes first, and return the best program.

    A range is dropped where its relaxation does not beat the best rate so far by more than is worth a thought.
    """
    most, fewest = task.most_sequences, task.fewest_micro_batches
    largest = most if fewest == 1 else (most - 1) // (fewest - 1)
    given = task.given.micro_batch_size
    sizes = (1, largest) if given is None else (given, given)
    ranges = [_Program(task, on_gpu, ffn, *sizes) for on_gpu, ffn in task.switches()]
    found = _Found(None, known_rate, None)
    if given is None:
        powers = [
            replace(each, smallest=1 << n, largest=1 << n) for each in ranges for n in range(largest.bit_length())
        ]
        found = _explored(task, powers, found)
        sought = _climbed(task, found)
        if sought.rate > found.rate:  # what reaches as much, and stands first, is the best one
            better = _explored(task, ranges, replace(found, rate=sought.rate * (1 - 2 * _WORTH_A_THOUGHT)))
            if better.program is not found.program:
                return better.program
    return _explored(task, ranges, found).program


@dataclass(frozen=True)
class _Found:
    """What a search has found: the best program, its rate, and its policy; or a rate that is known otherwise."""

    program: _Program | None
    rate: float
    policy: Policy | None


def _explored(task: Search, todo: Sequence[_Program], found: _Found) -> _Found:
    """Search these programs, the last one first, for one that beats what was found."""
    todo = list(todo)
    while todo:
        program = todo.pop()
        relaxed = program.relaxed(found.rate * (1 + _WORTH_A_THOUGHT))
        if relaxed is None:
            continue
        if parts := program.parts(relaxed):
            todo.extend(parts)
            continue
        if round(relaxed[0]) < program.smallest:
            continue  # fewer sequences than a micro-batch has: smaller ones are looked at on their own
        policy = program.policy_of(relaxed)
        reached = task.rate(policy)  # no number that is to be whole has a fraction
        if reached > found.rate * (1 + 1e-9):
            found = _Found(replace(program, limits=()), reached, policy)
            todo.append(program)  # Dinkelbach
    return found


def _climbed(task: Search, found: _Found) -> _Found:
    """Look for a better rate in the sizes that divide the best batch into whole micro-batches: fewer of them, then
    more, in steps that are halved where they do not help.

    Between two such sizes a larger one only wastes room in the last micro-batch, which the search of ranges would learn
    size by size.
    """
    if found.program is None or found.policy is None:
        return found
    batch, program = found.policy.batch_size, found.program
    count = -(-batch // program.smallest)
    step = count
    while step:
        for other in (count - step, count + step):
            size = -(-batch // other) if other > 0 else 0
            if size and task.fewest_micro_batches <= other <= (task.max_micro_batches or other):
                better = _explored(task, [replace(program, smallest=size, largest=size)], found)
                if better.rate > found.rate:
                    found, count = better, other
                    break
        else:
            step //= 2
    return found


@dataclass(frozen=True)
class _Program:
    """The mixed-integer program of one A_g, one F_g and a range of mu.

    The unknowns are N, micro-batches, r_w, r_c N, T, and the seconds of each task.
    """

    task: Search
    gpu_attention: bool
    gpu_ffn: bool
    smallest: int
    largest: int
    limits: tuple[tuple[int, float, float], ...] = ()  # column, least and most; a later one is the narrower

    def relaxed(self, rate: float) -> Any | None:
        """Return the unknowns with which the relaxed program reaches a higher rate; None where it does not."""
        solution = self._solve(self._gain(rate), integer=False)
        return solution if solution is not None and float(solution @ self._gain(rate)) < 0 else None

    def parts(self, relaxed: Any) -> tuple[_Program, ...]:
        """Return two programs in place of this one, divided at a fraction in its relaxed solution or by sizes.

        Returns none where there is neither.
        """
        if self.largest > _WIDE * self.smallest:
            return self._halves()
        for column in (2, 1, 0) if self._has_steps else (1, 0):
            number, low, high = (float(row[column]) for row in (relaxed, self._bounds.lb, self._bounds.ub))
            below = np.floor(number)
            if abs(number - round(number)) > _FRACTION and low <= below < high:
                return self._limited(column, low, below), self._limited(column, below + 1, high)
        return self._halves() if self.smallest < self.largest else ()

    def _limited(self, column: int, least: float, most: float) -> _Program:
        """Return this program with a limit more. All but its bounds is as here, and need not be made again."""
        limited = replace(self, limits=(*self.limits, (column, least, most)))
        kept = ("switches", "_layer", "_unit_s", "_num_columns", "_constraints")
        vars(limited).update({name: vars(self)[name] for name in kept if name in vars(self)})
        return limited

    def _halves(self) -> tuple[_Program, ...]:
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
        enough = LinearConstraint(self._row(Linear(batch=1.0)), lb=fewest)
        few = 0.25 / self.task.most_sequences
        objective = self._row(Linear(batch=1.0, resident_weights=-0.5, device_sequences=few))
        solution = self._solve(objective, integer=True, more=[LinearConstraint(-self._gain(rate), lb=0.0), enough])
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
        return _NUM_UNKNOWNS + 1 + sum(len(tasks) for tasks in self._layer.resources.values())

    def _row(self, term: Linear) -> Any:
        row = np.zeros(self._num_columns)
        row[:_NUM_UNKNOWNS] = term.coefficients
        row[2] *= self._step
        return row

    @property
    def _step(self) -> float:
        """The share that the unknown for r_w counts in: the pipeline's smallest, or the whole where any share will do.

        The pipeline keeps all or nothing of what is no expert.
        """
        step = self.task.deployment.storage.resident_step
        return step if step is not None and self._has_steps and self.gpu_ffn else 1.0

    @property
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

    def _solve(self, objective: Any, *, integer: bool, more: Sequence[LinearConstraint] = ()) -> Any | None:
        """Return the unknowns that minimise `objective`; None where nothing fits."""
        whole = np.zeros(self._num_columns)
        if integer:
            whole[:2] = 1
            whole[2] = self._has_steps
        constraints = [*self._constraints, *more]
        for presolve in (True, False):  # HiGHS solves a few programs without it only ("solve error")
            options = _SOLVER | {"presolve": presolve}
            result = milp(objective, constraints=constraints, bounds=self._bounds, integrality=whole, options=options)
            if result.success:
                break
            if result.status == _INFEASIBLE:
                return None
        assert result.success, f"the solver gave up: {result.message}"
        return result.x

    @cached_property
    def _bounds(self) -> Bounds:
        task, given = self.task, self.task.given
        low, high = np.zeros(self._num_columns), np.full(self._num_columns, np.inf)
        low[0], high[0] = given.batch_size or self.smallest, task.most_sequences
        low[1], high[1] = task.fewest_micro_batches, task.max_micro_batches or task.most_sequences
        share, all_steps = given.resident_weights, int(1 / self._step + 1e-9)
        low[2], high[2] = (0.0, all_steps) if share is None else (share, share)
        high[3] = task.most_sequences
        for column, least, most in self.limits:
            low[column], high[column] = least, most
        return Bounds(low, high)

    @cached_property
    def _constraints(self) -> list[LinearConstraint]:
        rows = [*self._shape_rows(), *self._memory_rows(), *self._time_rows()]
        matrix, low, high = zip(*rows, strict=True)
        return [LinearConstraint(np.array(matrix), np.array(low), np.array(high))]

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
                yield self._row(term) / scale, -np.inf, (limits[tier] * (1 - _MARGIN) - term.constant) / scale

    def _time_rows(self) -> Iterator[tuple[Any, float, float]]:
        column = _NUM_UNKNOWNS
        for tasks in self._layer.resources.values():
            total = self._row(Linear())
            total[_NUM_UNKNOWNS] = 1.0
            for task in tasks:
                column += 1
                total[column] = -1.0
                for roof in task.roofs.values():  # Eq. 14
                    row = self._row(-roof) / self._unit_s
                    row[column] = 1.0
                    yield row, roof.constant / self._unit_s, np.inf
            yield total, 0.0, np.inf  # Eq. 12 and 13


def nothing_fits(task: Search) -> ConfigError:
    """Name in an error the tier that is too small even for the smallest policy."""
    given = task.given
    batch = given.batch_size or (given.micro_batch_size or 1) * (task.fewest_micro_batches - 1) + 1
    micro_batch = given.micro_batch_size or -(-batch // (task.max_micro_batches or batch))
    on_gpu, ffn = next(task.switches(), (True, True))
    policy = Policy(
        batch_size=max(batch, micro_batch),
        micro_batch_size=micro_batch,
        gpu_attention=on_gpu,
        gpu_ffn=ffn,
        resident_weights=given.resident_weights or 0.0,
        resident_kv=given.resident_kv or 0.0,
    )
    missing = shortfalls(task.deployment, policy)
    if not missing:
        return ConfigError("strategy.policy", f"what is given leaves no policy that the pipeline can run: {given}")
    tier = max(missing, key=lambda name: missing[name])
    held = held_bytes(task.deployment, policy)[tier]
    whole = "in whole blocks " if tier == KV_CACHE else ""
    needed_gb = enough(sum(held.values()) * (1 + _MARGIN) + 1)
    limit_gb = task.deployment.limits_bytes[tier] / 1e9
    field = {KV_CACHE: "kv_cache_gb", "ram": "hardware.ram_gb"}.get(tier, f"hardware.{tier}_memory_gb")
    what = f"this policy needs {needed_gb} GB" if given != GivenPolicy() else f"any policy needs {needed_gb} GB"
    return ConfigError(field, f"{whole}{limit_gb:g} GB is too small: {what} ({told_bytes(held)})")
