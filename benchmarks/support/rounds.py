"""Contestants that take turns: a disturbance then meets all of them, and ratios are taken within a round."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.support.disturbance import CoreProbe, Run, observed
from benchmarks.support.stopwatch import Stopwatch, stopwatch

MIN_UNDISTURBED = 3
SLOW_S = 0.4


class Rounds:
    """`target` is timed by pytest-benchmark, `others` between its runs.

    What is named a ceiling runs in every round, right before the target; the rest in every third, and who needs longer
    than `SLOW_S` in every ninth. pytest-benchmark's own statistics hold all rounds. Those here leave out disturbed
    runs, and count them, unless fewer than three would remain: then all rounds count, and `summary` says so.
    """

    def __init__(
        self, target: str, run: Callable[[], object], others: Mapping[str, Stopwatch], num_threads: int = 1
    ) -> None:
        self.target = target
        self.others = dict(others)
        self.rounds: list[dict[str, Run]] = []
        self._run = stopwatch(run)
        self._probe = CoreProbe(num_threads)
        self._slow: set[str] | None = None  # known after the first, unmeasured turn

    def measure(self, benchmark: Any, num_rounds: int) -> None:
        benchmark.pedantic(self._target, setup=self._others, rounds=num_rounds)

    def _others(self) -> None:
        if self._slow is None:  # page faults, thread pools and code caches, for everyone
            self._slow = {name for name, run in self.others.items() if run() > SLOW_S}
            self._run()
        turn = len(self.rounds)
        ceilings = [name for name in self.others if name.endswith("ceiling")]
        rest = [name for name in self.others if name not in ceilings and turn % (9 if name in self._slow else 3) == 0]
        shift = turn // 3 % max(1, len(rest))
        names = (*rest[shift:], *rest[:shift], *ceilings)
        self.rounds.append({name: observed(self.others[name], self._probe) for name in names})

    def _target(self) -> None:
        # pytest-benchmark's time includes the probes; the one kept here does not
        self.rounds[-1][self.target] = observed(self._run, self._probe)

    def _disturbed(self, run: Run) -> bool:
        return run.disturbed(self._probe.best)

    def _judged(self, *names: str) -> list[list[Run]]:
        """Return the runs of these contestants in each round that counts."""
        among = [[r[name] for name in names] for r in self.rounds if all(name in r for name in names)]
        return among if self._too_few_quiet(*names) else [runs for runs in among if self._quiet(runs)]

    def _quiet(self, runs: Iterable[Run]) -> bool:
        return not any(self._disturbed(run) for run in runs)

    def _too_few_quiet(self, *names: str) -> bool:
        """Tell whether fewer than three rounds left all of these undisturbed: all of their rounds count then."""
        among = [[r[name] for name in names] for r in self.rounds if all(name in r for name in names)]
        return sum(map(self._quiet, among)) < min(MIN_UNDISTURBED, len(among))

    def seconds(self, name: str) -> list[float]:
        return [run.seconds for (run,) in self._judged(name)]

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds(name))

    def ratio(self, slower: str, faster: str) -> float:
        """Return how many times the time of `faster` `slower` takes: the median over rounds."""
        return statistics.median(a.seconds / b.seconds for a, b in self._judged(slower, faster))

    def ratio_of_all(self, slower: str, faster: str) -> float:
        """Return the `ratio` over all rounds, including the disturbed ones."""
        pairs = [(r[slower], r[faster]) for r in self.rounds if slower in r and faster in r]
        return statistics.median(a.seconds / b.seconds for a, b in pairs)

    def spread(self, name: str) -> float:
        """Return the distance of the quartiles over the median."""
        values = self.seconds(name)
        if len(values) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / middle

    def summary(self) -> dict[str, Any]:
        names = (self.target, *self.others)
        taken = {name: [r[name] for r in self.rounds if name in r] for name in names}
        return {
            "num_rounds": len(self.rounds),
            "num_runs": {name: len(runs) for name, runs in taken.items()},
            "num_disturbed": {name: sum(map(self._disturbed, runs)) for name, runs in taken.items()},
            "num_judged": {name: len(self._judged(name)) for name in names},
            "all_count": {name: self._too_few_quiet(name, self.target) for name in names},
            "ratio": {name: self.ratio(name, self.target) for name in self.others},
            "ratio_of_all": {name: self.ratio_of_all(name, self.target) for name in self.others},
            "load_average": os.getloadavg()[0],
            "median_s": {name: self.median_s(name) for name in names},
            "median_s_of_all": {name: statistics.median(run.seconds for run in runs) for name, runs in taken.items()},
            "spread": {name: self.spread(name) for name in names},
        }
