"""A slow simulator that is obviously right: exact rational time, every lane looked at in every step, no shortcuts.

It follows the contract's text, shares no code with the simulated machine, and derives dependencies by comparing every
op with every earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from harness.machine.base import Lane

FREE = Fraction(0)


@dataclass(frozen=True)
class Job:
    """An op: lone seconds, host bytes per second at full speed, and what orders it."""

    lane: Lane
    seconds: Fraction
    demand: Fraction = FREE
    packets: int = 1
    urgent: bool = False
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    after: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Running:
    number: int
    done: Fraction  # of its lone seconds
    first_packet: int  # of the current span
    since: Fraction


@dataclass(eq=False)
class ReferenceSimulator:
    host_bytes_s: Fraction
    proportional: bool = False
    submit_s: Fraction = FREE
    wake_s: Fraction = FREE
    jobs: list[Job] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    submitted: list[Fraction] = field(default_factory=list)
    started: dict[int, Fraction] = field(default_factory=dict)
    ended: dict[int, Fraction] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    running: dict[Lane, _Running] = field(default_factory=dict)
    paused: dict[Lane, tuple[int, int]] = field(default_factory=dict)  # (op, packets done)
    spans: list[tuple[int, int, int, Fraction, Fraction]] = field(default_factory=list)  # op, packet, count, from, to
    clock: Fraction = FREE
    host: Fraction = FREE

    # -- the strategy's side

    def submit(self, job: Job) -> int:
        self.host += self.submit_s
        number = len(self.jobs)
        direct = {
            i
            for i, other in enumerate(self.jobs)
            if i in job.after or other.writes & (job.reads | job.writes) or other.reads & job.writes
        }
        self.jobs.append(job)
        self.before.append(self._effective(direct))
        self.submitted.append(self.host)
        return number

    def _effective(self, numbers: set[int]) -> set[int]:
        """Return ops that ran or will: in the place of a cancelled one stands what it would have followed, and so
        on."""
        inherited = (self._effective(self.before[i]) for i in numbers & self.cancelled)
        return (numbers - self.cancelled).union(*inherited)

    def wait_any(self, numbers: list[int]) -> list[int]:
        while not any(self.settled(n) for n in numbers):
            self.step(None)
        self._wake()
        return sorted((n for n in numbers if self.settled(n)), key=lambda n: (self.ended.get(n, FREE), n))

    def drain(self) -> None:
        while not all(self.settled(n) for n in range(len(self.jobs))):
            self.step(None)
        self._wake()

    def cancel(self, number: int) -> bool:
        self.catch_up()
        needed = any(number in self.before[n] for n in range(len(self.jobs)) if n not in self.cancelled)
        if number in self.started or number in self.cancelled or needed:
            return False
        self.cancelled.add(number)
        return True

    def now(self) -> Fraction:
        self.catch_up()
        return self.host

    def catch_up(self) -> None:
        while self.clock < self.host:
            self.step(self.host)

    def settled(self, number: int) -> bool:
        return number in self.ended or number in self.cancelled

    def _wake(self) -> None:
        """Wake whoever had to wait; one who did not have to sees the lanes as of its own time."""
        if self.clock > self.host:
            self.host = self.clock + self.wake_s
        else:
            self.catch_up()

    # -- the lanes' side

    def step(self, until: Fraction | None) -> None:
        self._start()
        speeds = self._speeds()
        times = [self._next(lane, speeds) for lane in self._lanes()]
        next_time = min((t for t in times if t is not None), default=None)
        assert next_time is not None or until is not None, "deadlock"
        to = next_time if until is None or (next_time is not None and next_time <= until) else until
        assert to is not None
        for lane, run in self.running.items():
            run.done += (to - self.clock) * speeds[lane]
        self.clock = to
        for lane in self._lanes():
            self._end_or_pause(lane)

    def _lanes(self) -> list[Lane]:
        return sorted({job.lane for job in self.jobs})

    def _heads(self, lane: Lane) -> dict[bool, int]:
        """Return the first op of each class that has not begun, where it is ready."""
        heads = {}
        for urgent in (True, False):
            queue = [
                n
                for n, job in enumerate(self.jobs)
                if job.lane == lane and job.urgent == urgent and n not in self.started and n not in self.cancelled
            ]
            if queue and all(self.settled(n) for n in self.before[queue[0]]):
                heads[urgent] = queue[0]
        return heads

    def _start(self) -> None:
        for lane in self._lanes():
            if lane in self.running:
                continue
            heads = {u: n for u, n in self._heads(lane).items() if self.submitted[n] <= self.clock}
            if True in heads:
                self._begin(lane, heads[True])
            elif lane in self.paused:
                number, packets = self.paused.pop(lane)
                done = self.jobs[number].seconds * packets / self.jobs[number].packets
                self.running[lane] = _Running(number, done, packets, self.clock)
            elif False in heads:
                self._begin(lane, heads[False])

    def _begin(self, lane: Lane, number: int) -> None:
        self.started[number] = self.clock
        self.running[lane] = _Running(number, FREE, 0, self.clock)

    def _speeds(self) -> dict[Lane, Fraction]:
        """Compute max-min fairness by filling: all unsatisfied lanes grow alike until one has enough."""
        demands = {lane: self.jobs[run.number].demand for lane, run in self.running.items()}
        if self.proportional:
            part = min(Fraction(1), self.host_bytes_s / (sum(demands.values()) or 1))
            return {lane: part if demand else Fraction(1) for lane, demand in demands.items()}
        got = {lane: FREE for lane in demands}
        left, open_ = self.host_bytes_s, {lane for lane, demand in demands.items() if demand}
        while open_ and left:
            level = min(min(demands[x] - got[x] for x in open_), left / len(open_))
            for lane in open_:
                got[lane] += level
            left -= level * len(open_)
            open_ = {lane for lane in open_ if got[lane] < demands[lane]}
        return {lane: got[lane] / demand if demand else Fraction(1) for lane, demand in demands.items()}

    def _next(self, lane: Lane, speeds: dict[Lane, Fraction]) -> Fraction | None:
        heads = self._heads(lane)
        if lane not in self.running:
            return min((self.submitted[n] for n in heads.values()), default=None)
        run = self.running[lane]
        job, times = self.jobs[run.number], [self.clock + (self.jobs[run.number].seconds - run.done) / speeds[lane]]
        if not job.urgent and job.packets > 1 and True in heads:
            from_ = max(self.clock, self.submitted[heads[True]])
            for packet in range(job.packets):
                at = self.clock + (job.seconds * packet / job.packets - run.done) / speeds[lane]
                if at >= from_:
                    times.append(at)
            if self.submitted[heads[True]] > self.clock:
                times.append(self.submitted[heads[True]])
        return min(times)

    def _end_or_pause(self, lane: Lane) -> None:
        if lane not in self.running:
            return
        run = self.running[lane]
        job = self.jobs[run.number]
        if run.done == job.seconds:
            self._record(lane, job.packets)
            self.ended[run.number] = self.clock
            return
        urgent = self._heads(lane).get(True)
        position = run.done * job.packets / job.seconds
        if job.urgent or urgent is None or self.submitted[urgent] > self.clock or position.denominator > 1:
            return
        if job.packets > 1:
            self.paused[lane] = (run.number, int(position))
            self._record(lane, int(position))

    def _record(self, lane: Lane, packets_done: int) -> None:
        run = self.running.pop(lane)
        if packets_done > run.first_packet:
            count = packets_done - run.first_packet
            self.spans.append((run.number, run.first_packet, count, run.since, self.clock))
