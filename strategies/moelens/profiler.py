"""The pipeline profiler (MoE-Lens §6.3, Figure 7): how many tokens keep the GPU as busy as the link.

GPU time of one layer's GA and GB is measured over token counts around a first estimate while weights are streaming,
a line time(n) = a n + c is fitted, and with the time t_w of one layer's transfer, n_real = (t_w - c) / a.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence, State
from harness.machine.base import Ticket
from harness.memory.kv_cache import BlockAllocator
from harness.memory.weights import WeightStream
from harness.workload.request import Request
from strategies.moelens.vslpipe import split

_FRACTIONS = (0.6, 0.8, 1.0, 1.2)
_MAX_STEPS = 6
_PROBE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured line and transfer time. `samples` are (tokens, seconds) of one layer on the gpu lane."""

    seconds_per_token: float  # a
    fixed_s: float  # c
    layer_transfer_s: float  # t_w
    samples: tuple[tuple[int, float], ...]

    @property
    def n_real(self) -> float:
        return (self.layer_transfer_s - self.fixed_s) / self.seconds_per_token

    def gpu_tok_s(self, num_layers: int) -> float | None:
        """Return the tokens a second at which the GPU is saturated; None where its ops take longer than the weights'
        transfer however few tokens there are."""
        return self.n_real / (self.layer_transfer_s * num_layers) if self.n_real > 0 else None


def _length_s(tickets: list[Ticket]) -> float:
    return max(t.finished_s or 0.0 for t in tickets) - min(t.started_s or 0.0 for t in tickets)


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least-squares (slope, intercept); through the origin where the points allow no rising line."""
    counts = np.array([n for n, _ in points], dtype=float)
    seconds = np.array([s for _, s in points])
    if len(set(counts)) > 1:
        slope, fixed_s = np.polyfit(counts, seconds, 1)
        if slope > 0:
            return float(slope), float(max(fixed_s, 0.0))
    return float(seconds.mean() / counts.mean()), 0.0


class PipelineProfiler:
    """Runs real ops of one layer in buffers of its own, which are given back by `close`."""

    def __init__(self, engine: Engine, *, prompt_tokens: int, max_tokens: int, packet_bytes: int, repeats: int) -> None:
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._repeats = repeats
        self._max_tokens = max_tokens
        self._emit = Emitter(engine)
        self._stream = WeightStream(engine.machine, engine.store, depth=2, packet_bytes=packet_bytes)
        last = engine.spec.num_layers - 1  # leading layers may be dense
        self._probed, self._other = last, max(last - 1, 1 - last)  # what is computed, what is transferred meanwhile
        self._acts: list[Activations] = []
        self._transfers_s: list[float] = []  # of a layer, beside each computation
        self._rng = np.random.default_rng(0)

    def measure(self) -> Profile:
        layer_transfer_s = min(self._transfer_layer(self._other) for _ in range(self._repeats))
        self._transfer_layer(self._probed)  # the weights that the probes compute with
        estimate = self._saturating_tokens(layer_transfer_s)
        counts = sorted({int(min(max(estimate * f, 16), self._max_tokens)) for f in _FRACTIONS})
        self._make_room(counts[-1])
        self._transfers_s.clear()
        samples = [(n, self._compute(n)) for _ in range(self._repeats) for n in counts]
        layer_transfer_s = float(np.median(self._transfers_s))  # beside a busy GPU, as it will be
        best = [(n, min(s for m, s in samples if m == n)) for n in counts]  # disturbances only ever add time
        slope, fixed_s = line_through(best)
        return Profile(
            seconds_per_token=slope, fixed_s=fixed_s, layer_transfer_s=layer_transfer_s, samples=tuple(samples)
        )

    def close(self) -> None:
        self._stream.close()
        for acts in self._acts:
            acts.close()

    def _saturating_tokens(self, layer_transfer_s: float) -> float:
        """Tokens at which the GPU takes about as long as the transfer, by secant steps from a small probe.

        The paper starts from Equation 2; steps from below need no peak rate and stay within the buffers. GPU time is
        concave in the tokens (few tokens already touch every expert), so a line through small counts falls short.
        """
        tokens, before = _PROBE_TOKENS, (0, 0.0)
        self._make_room(min(_PROBE_TOKENS, self._max_tokens))
        self._compute(min(tokens, self._max_tokens))  # warm-up: first use of every kernel
        for _ in range(_MAX_STEPS):
            tokens = min(tokens, self._max_tokens)
            self._make_room(tokens)
            seconds = min(self._compute(tokens) for _ in range(2))
            slope = (seconds - before[1]) / max(tokens - before[0], 1)
            wanted = tokens + (layer_transfer_s - seconds) / max(slope, 1e-9)
            wanted = min(max(wanted, tokens / 2), 4 * tokens, self._max_tokens)
            if abs(wanted / tokens - 1) < 0.2 or tokens == before[0]:
                break
            before, tokens = (tokens, seconds), int(max(wanted, 16))
        return wanted

    def _make_room(self, max_tokens: int) -> None:
        for acts in self._acts:
            acts.close()
        machine, spec = self._engine.machine, self._engine.spec
        self._acts = [Activations(machine, spec, max_tokens=max_tokens, name=f"profiler {i}") for i in range(2)]

    def _transfer_layer(self, index: int) -> float:
        """Seconds on the link for all parts of one layer."""
        tickets = self._stream.request_layer(index)
        for ticket in tickets:
            self._engine.machine.wait(ticket)
        if index != self._probed:
            self._release(index)
        return _length_s(tickets)

    def _release(self, index: int) -> None:
        for name in self._stream.part_names(index):
            self._stream.release(index, name)

    def _compute(self, num_tokens: int) -> float:
        """Seconds on the gpu lane for one layer over `num_tokens` prefill tokens in two halves, the link at work."""
        busy = self._stream.request_layer(self._other)
        tickets: list[Ticket] = []
        for i, half in enumerate(split(PassPlan(self._sequences(num_tokens), [], "profile"))):
            allocator = BlockAllocator(2 * num_tokens, self._engine.kv.allocator.block_size)
            for sequence in half[0]:
                allocator.grow(sequence, sequence.num_tokens)
            it = InFlight(assemble(i, half[0], [], allocator), self._acts[i])
            self._emit.embed(it)
            tickets += self._layer(it)
        for ticket in tickets:
            self._engine.machine.wait(ticket)
        for ticket in busy:
            self._engine.machine.wait(ticket)
        self._transfers_s.append(_length_s(busy))
        self._release(self._other)
        return sum((t.finished_s or 0.0) - (t.started_s or 0.0) for t in tickets)

    def _layer(self, it: InFlight) -> list[Ticket]:
        layer, part = self._probed, self._stream.part
        tickets: list[Ticket | None] = [self._emit.attention_in(it, layer, part(layer, "attention_in"))]
        tickets.append(self._emit.prefill_attention(it, layer))
        tickets.append(self._emit.attention_out(it, layer, part(layer, "attention_out")))
        tickets.append(self._emit.experts(it, layer, self._stream.experts(layer)))
        tickets.append(self._emit.combine(it, layer))
        return [t for t in tickets if t is not None]

    def _sequences(self, num_tokens: int) -> list[Sequence]:
        """Prompts of the workload's mean length with random tokens, `num_tokens` in all."""
        sequences: list[Sequence] = []
        for number in count():
            length = min(self._prompt_tokens, num_tokens - number * self._prompt_tokens)
            if length <= 0:
                return sequences
            ids = self._rng.integers(0, self._engine.spec.vocab_size, length)
            request = Request(request_id=-1 - number, prompt_ids=tuple(ids.tolist()), max_new_tokens=1, text=None)
            sequences.append(Sequence(request, state=State.PREFILL))
        raise AssertionError("unreachable")
