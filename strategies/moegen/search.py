"""Search the policy with the least time a request (MoE-Gen §4.3 and 4.4): B/T of Eq. 1, with T by Eq. 4.

Candidates differ from the best policy so far in one variable. One that Eq. 2 or 3 rules out is dropped at once, by the
same sizes by which the pipeline reserves its memory. For every other the pipeline's own ops are recorded: first with
the upper one of two whole numbers of experts a layer that stay on the device, which lets most be passed over, then with
both. One becomes the best so far if it takes 0.2 % less time. All variables are gone through once, and a second time
where that has found a better policy. The result is the fastest policy of all that were not passed over, and of
equally fast ones that which differs least from the first one. After two rounds it may have a faster neighbour, and it
need not be the fastest of all. Where the device has memory to spare, it goes to experts that stay there.

The decode batch is no variable: it is what is given, or as large as Eq. 2 and the workload allow. Nor are tokens moved
to host memory where they fit on the device (§4.2): there rows are gathered and added on the CPU for each expert, which
was timed beside the link alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

from harness.memory.tiers import DEVICE
from strategies.moegen.pass_time import PassTime
from strategies.moegen.planner import Deployment, hiding_batch
from strategies.moegen.policy import GivenPolicy, Policy
from strategies.moegen.recorded import Batch
from strategies.moegen.times import PassTimes

_ROUNDS = 2
_GAIN = 0.002  # share of the time by which a candidate must be better
_SHARES = tuple(tenth / 10 for tenth in range(11))  # values of omega; every second one is tried first
_FEWEST_EXPERT_TOKENS = 32  # values of b_e begin here
_RUNNERS_UP = 5

Value = int | float | bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate is a policy with the times of its passes. `request_s` are the seconds of both phases for a request,
    each the T/B of Eq. 1."""

    policy: Policy
    prefill: PassTime
    decode: PassTime | None  # None where nothing is decoded
    request_s: float

    def as_record(self) -> dict[str, Any]:
        found: dict[str, Any] = {"policy": self.policy.as_record(), "request_s": self.request_s}
        for name, times in (("prefill", self.prefill), ("decode", self.decode)):
            if times is not None:
                found |= {f"{name}_pass_s": times.seconds, f"{name}_layer_s": times.moe_layer_s}
                found[f"{name}_decided_by"] = times.decided_by
                found[f"{name}_bound"] = dict(list(times.bound.items())[:3])
                found[f"{name}_busy_s"] = dict(times.busy)
        return found


@dataclass(frozen=True, kw_only=True)
class Found:
    """The search has found the best candidate, the next ones of those whose time it knows, and how many it has thought
    of."""

    best: Candidate
    runners_up: list[Candidate]
    num_considered: int
    num_without_memory: int
    num_recorded: int

    def as_record(self) -> dict[str, Any]:
        return {
            "predicted": self.best.as_record(),
            "runners_up": [other.as_record() for other in self.runners_up],
            "candidates": {
                "considered": self.num_considered,
                "without memory": self.num_without_memory,
                "passes recorded": self.num_recorded,
            },
        }


@dataclass(frozen=True, kw_only=True)
class _Variable:
    """A variable of the policy: in which phase it is (None: in both), its name, and the setting that fixes it."""

    phase: str | None
    name: str
    setting: str

    def of(self, policy: Policy) -> Value:
        value: Value = getattr(getattr(policy, self.phase) if self.phase else policy, self.name)
        return value

    def set(self, policy: Policy, value: Value) -> Policy:
        if self.phase is None:
            return replace(policy, **{self.name: value})  # type: ignore[arg-type]
        return replace(policy, **{self.phase: replace(getattr(policy, self.phase), **{self.name: value})})


_VARIABLES = (
    _Variable(phase="decode", name="cpu_attention", setting="cpu_attention"),
    _Variable(phase="decode", name="attention_batch", setting="attention_batch"),
    _Variable(phase="decode", name="expert_batch", setting="expert_batch"),
    _Variable(phase="decode", name="on_device", setting="on_device"),
    _Variable(phase=None, name="expert_slots", setting="expert_slots"),
    _Variable(phase=None, name="dense_slots", setting="dense_slots"),
    _Variable(phase="prefill", name="batch_size", setting="prefill_batch_size"),
    _Variable(phase="prefill", name="attention_batch", setting="prefill_attention_batch"),
    _Variable(phase="prefill", name="expert_batch", setting="prefill_expert_batch"),
    _Variable(phase="prefill", name="on_device", setting="on_device"),
)


@dataclass(eq=False)
class Search:
    """Searches around a policy that fits. What is `given` stays as it is."""

    deployment: Deployment
    times: PassTimes
    given: GivenPolicy
    _known: dict[Policy, Candidate | float | None] = field(default_factory=dict)  # seconds: passed over; None: no room

    def around(self, start: Policy) -> Found:
        """Return the best policy that is found from `start`, which must fit."""
        start = self._with_less_prefill(start)
        assert self.deployment.fits(start), f"the search starts from a policy that does not fit: {start}"
        best = self._known[start] = self.candidate(start)
        for _ in range(_ROUNDS):
            before = best
            for variable in _VARIABLES:
                best = self._best_along(variable, best)
            if best is before:
                break
        found = self._fastest(start)
        return Found(
            best=found[0],
            runners_up=found[1 : _RUNNERS_UP + 1],
            num_considered=len(self._known),
            num_without_memory=sum(each is None for each in self._known.values()),
            num_recorded=self.times.num_recorded,
        )

    def _fastest(self, start: Policy) -> list[Candidate]:
        """Return the candidates whose time is known, fastest first. So is that of all that might be the fastest one, by
        a gain that is too small for the search."""
        fastest_s = min(each.request_s for each in self._known.values() if isinstance(each, Candidate))
        for policy, known in self._known.items():
            if isinstance(known, float) and (known <= fastest_s or self.times.is_whole(policy)):
                self._known[policy] = self.candidate(policy)
        found = [each for each in self._known.values() if isinstance(each, Candidate)]
        return sorted(found, key=lambda each: (each.request_s, *_order(each.policy, start)))

    def _with_less_prefill(self, policy: Policy) -> Policy:
        """Return the policy with so many prompts at a time, if there are as many, that experts hide their transfer."""
        prefill, size = policy.prefill, 1 << ceil(log2(hiding_batch(self.deployment)))
        size = max(size, self.given.prefill_attention_batch or 1)
        if self.given.prefill_batch_size is not None or size >= prefill.batch_size:
            return policy
        attention_batch = min(prefill.attention_batch, size)
        return replace(policy, prefill=replace(prefill, batch_size=size, attention_batch=attention_batch))

    def candidate(self, policy: Policy) -> Candidate:
        """Return what a policy is predicted to take. A variable of one phase changes the other one's time too: by the
        experts for which it leaves room on the device."""
        decode = None
        prefill = self.times.of(policy, self.prefill_batch(policy.prefill.batch_size))
        if self.deployment.shape.new_tokens > 1:
            decode = self.times.of(policy, self.decode_batch(policy.decode.batch_size))
        request_s = self._request_s(policy, prefill.seconds, 0.0 if decode is None else decode.seconds)
        return Candidate(policy=policy, prefill=prefill, decode=decode, request_s=request_s)

    def _sooner_s(self, policy: Policy) -> float:
        """Return the seconds of a request that a policy would hardly take less than; see `PassTimes.sooner_s`."""
        decode_s = 0.0
        prefill_s = self.times.sooner_s(policy, self.prefill_batch(policy.prefill.batch_size))
        if self.deployment.shape.new_tokens > 1:
            decode_s = self.times.sooner_s(policy, self.decode_batch(policy.decode.batch_size))
        return self._request_s(policy, prefill_s, decode_s)

    def _request_s(self, policy: Policy, prefill_s: float, decode_s: float) -> float:
        """Return the seconds of a request, the T/B of Eq. 1 of both phases, from those of their passes."""
        steps = self.deployment.shape.new_tokens - 1
        return prefill_s / policy.prefill.batch_size + steps * decode_s / policy.decode.batch_size

    def prefill_batch(self, num_sequences: int) -> Batch:
        shape = self.deployment.shape
        tokens = shape.longest_prompt if shape.padded else int(shape.prompt_tokens)  # so that the buffers hold them all
        return Batch(num_sequences=num_sequences, tokens=tokens, decodes=False)

    def decode_batch(self, num_sequences: int) -> Batch:
        """Return the batch halfway through its generation."""
        shape = self.deployment.shape
        tokens = max(1, round(shape.prompt_tokens + (shape.new_tokens - 1) / 2))
        return Batch(num_sequences=num_sequences, tokens=tokens, decodes=True)

    def _best_along(self, variable: _Variable, best: Candidate) -> Candidate:
        """Go through a variable's values from the present one on, both ways, as long as that helps. Omega is tried all
        over, since where the link and the CPU are both busy neither way may help at first."""
        if getattr(self.given, variable.setting) is not None:
            return best
        values = sorted({*self._values(variable, best.policy), variable.of(best.policy)})
        if variable.name == "cpu_attention":
            for value in values[::2]:
                best = self._better(best, variable, value)
        at = values.index(variable.of(best.policy))
        for way in (values[at + 1 :], values[:at][::-1]):
            for value in way:
                better = self._better(best, variable, value)
                if better is best:
                    break
                best = better
        return best

    def _better(self, best: Candidate, variable: _Variable, value: Value) -> Candidate:
        """Return the best candidate with another value of the variable, if that is better and fits, else itself."""
        policy, must_take_s = self._with(variable, best.policy, value), best.request_s * (1 - _GAIN)
        if policy not in self._known:
            self._known[policy] = self._sooner_s(policy) if self.deployment.fits(policy) else None
        other = self._known[policy]
        if isinstance(other, float) and other < must_take_s:
            other = self._known[policy] = self.candidate(policy)
        return other if isinstance(other, Candidate) and other.request_s < must_take_s else best

    def _with(self, variable: _Variable, policy: Policy, value: Value) -> Policy:
        """Return the policy with another value, and with as many experts on the device as that leaves room for."""
        policy = variable.set(policy, value)
        for phase in ("prefill", "decode"):
            its = getattr(policy, phase)
            if its.attention_batch > its.batch_size:
                policy = replace(policy, **{phase: replace(its, attention_batch=its.batch_size)})
        return self.filled(policy)

    def filled(self, policy: Policy) -> Policy:
        """Return the policy with as many experts on the device as it leaves room for, unless their number is given."""
        weights = self.deployment.weights
        if self.given.resident_experts is not None or policy.expert_slots == 0:
            return policy
        policy = replace(policy, resident_experts=0)
        left = self.deployment.left_bytes(policy)[DEVICE] // max(weights.expert_bytes, 1)
        most = max(weights.num_experts - policy.expert_slots, 0)
        return replace(policy, resident_experts=min(max(left, 0), most))

    def _values(self, variable: _Variable, policy: Policy) -> Iterator[Value]:
        spec, decodes = self.deployment.spec, self.deployment.shape.new_tokens > 1
        if variable.phase == "decode" and not decodes:
            return iter(())
        if variable.name == "cpu_attention":
            return iter(_SHARES)
        if variable.name == "on_device":
            return iter((True,))  # what fits is not moved to the host again
        if variable.name == "dense_slots":
            return iter(sorted({1, min(2, spec.num_layers), spec.num_layers}))
        if variable.name == "expert_slots":
            return _doubled(1, spec.num_experts) if policy.expert_slots else iter(())
        if variable.name == "batch_size":
            return _doubled(self.given.prefill_attention_batch or 1, policy.decode.batch_size)
        if variable.name == "attention_batch":
            return _doubled(1, getattr(policy, variable.phase or "decode").batch_size)
        return _doubled(_FEWEST_EXPERT_TOKENS, self._most_expert_tokens(policy, variable.phase == "prefill"))

    def _most_expert_tokens(self, policy: Policy, prefills: bool) -> int:
        """Return the tokens of a slice beyond which nothing is won: about twice those of an expert."""
        spec, shape = self.deployment.spec, self.deployment.shape
        tokens = policy.prefill.batch_size * shape.prompt_tokens if prefills else policy.decode.batch_size
        return max(_FEWEST_EXPERT_TOKENS, ceil(2 * tokens * spec.experts_per_token / max(spec.num_experts, 1)))


def _order(policy: Policy, start: Policy) -> tuple[float, ...]:
    """Return by what equally fast policies are sorted: those that differ from the first one in fewer variables, then
    those with larger values. Which was found first does not matter."""
    differs = sum(variable.of(policy) != variable.of(start) for variable in _VARIABLES)
    return (differs, *(-float(value) for value in policy.as_record().values()))


def _doubled(first: int, most: int) -> Iterator[int]:
    """Yield powers of two times `first` below `most`, and `most`."""
    value = first
    while value < most:
        yield value
        value *= 2
    yield most
