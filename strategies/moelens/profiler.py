"""The pipeline profiler (MoE-Lens §6.3, Figure 7) finds how many tokens keep the GPU as busy as the link.

GPU time of one layer's GA and GB is measured over token counts around a first estimate while weights are streaming,
a line time(n) = a n + c is fitted, and with the time t_w of one layer's transfer, n_real = (t_w - c) / a.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from harness.bench.op_bench import OpBench, Timed, length_s
from harness.bench.shapes import Shape
from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.engine import Engine
from harness.machine.base import Ticket
from harness.memory.weights import WeightStream
from strategies.moelens.vslpipe import split

_FRACTIONS = (0.6, 0.8, 1.0, 1.2)
_MAX_STEPS = 6
_PROBE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile has what was measured: a line over tokens, and the time of a layer's transfer.

    `samples` are (tokens, seconds) of one layer on the gpu lane.
    """

    seconds_per_token: float  # a
    fixed_s: float  # c
    layer_transfer_s: float  # t_w
    samples: tuple[tuple[int, float], ...]

    @property
    def n_real(self) -> float:
        return (self.layer_transfer_s - self.fixed_s) / self.seconds_per_token

    def gpu_tok_s(self, num_layers: int) -> float | None:
        """Return the tokens a second at which the GPU is saturated.

        Returns None where its ops take longer than the weights' transfer, however few tokens there are.
        """
        return self.n_real / (self.layer_transfer_s * num_layers) if self.n_real > 0 else None


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line by least squares and return (slope, intercept).

    The line goes through the origin where the points allow no rising one.
    """
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
        # What is computed and what is transferred meanwhile, in a slot each, so that they can be any two layers.
        self._computed, self._transferred = (
            WeightStream(engine.machine, engine.store, depth=1, packet_bytes=packet_bytes, name=f"{name} weights")
            for name in ("computed", "transferred")
        )
        self._bench = OpBench(engine, self._computed)
        layers = engine.spec.moe_layers
        self._probed, self._other = layers[-1], layers[-2:][0]
        self._transfers_s: list[float] = []  # of a layer, during each computation

    def measure(self) -> Profile:
        """Return the profile, which takes some passes of one layer."""
        layer_transfer_s = min(self._arrived(self._request()) for _ in range(self._repeats))
        self._computed.request_layer(self._probed)  # the weights that the probes compute with
        self._engine.machine.drain()
        estimate = self._saturating_tokens(layer_transfer_s)
        counts = sorted({int(min(max(estimate * f, 16), self._max_tokens)) for f in _FRACTIONS})
        self._make_room(counts[-1])
        self._transfers_s.clear()
        samples = [(n, self._compute(n).shortest_s) for _ in range(self._repeats) for n in counts]
        layer_transfer_s = float(np.median(self._transfers_s))  # while the GPU is busy, as in the run
        best = [(n, min(s for m, s in samples if m == n)) for n in counts]  # disturbances only ever add time
        slope, fixed_s = line_through(best)
        return Profile(
            seconds_per_token=slope, fixed_s=fixed_s, layer_transfer_s=layer_transfer_s, samples=tuple(samples)
        )

    def close(self) -> None:
        """Give all buffers back."""
        self._computed.close()
        self._transferred.close()
        for acts in self._bench.acts:
            acts.close()

    def _saturating_tokens(self, layer_transfer_s: float) -> float:
        """Return the tokens at which the GPU takes about as long as the transfer, found by secant steps from a small
        probe.

        The paper starts from Equation 2; steps from below need no peak rate and stay within the buffers. GPU time is
        concave in the tokens (few tokens already touch every expert), so a line through small counts falls short.
        """
        tokens, before = _PROBE_TOKENS, (0, 0.0)
        self._make_room(min(_PROBE_TOKENS, self._max_tokens))
        self._compute(min(tokens, self._max_tokens))  # warm-up: first use of every kernel
        for _ in range(_MAX_STEPS):
            tokens = min(tokens, self._max_tokens)
            self._make_room(tokens)
            seconds = self._compute(tokens, times=2).shortest_s
            slope = (seconds - before[1]) / max(tokens - before[0], 1)
            wanted = tokens + (layer_transfer_s - seconds) / max(slope, 1e-9)
            wanted = min(max(wanted, tokens / 2), 4 * tokens, self._max_tokens)
            if abs(wanted / tokens - 1) < 0.2 or tokens == before[0]:
                break
            before, tokens = (tokens, seconds), int(max(wanted, 16))
        return wanted

    def _make_room(self, max_tokens: int) -> None:
        self._engine.machine.drain()  # other lanes may still poison what the computation has not waited for
        for acts in self._bench.acts:
            acts.close()
        machine, spec = self._engine.machine, self._engine.spec
        self._bench.acts = [Activations(machine, spec, max_tokens=max_tokens, name=f"profiler {i}") for i in range(2)]

    def _request(self) -> list[Ticket]:
        """Request the layer that is only transferred."""
        return self._transferred.request_layer(self._other)

    def _arrived(self, tickets: list[Ticket]) -> float:
        """Wait for that layer's parts and drop them. Return the seconds that they took on the link."""
        for ticket in tickets:
            self._engine.machine.wait(ticket)
        for name in self._transferred.part_names(self._other):
            self._transferred.release(self._other, name)
        return length_s(tickets)

    def _compute(self, num_tokens: int, *, times: int = 1) -> Timed:
        """Time one layer over `num_tokens` prefill tokens in two halves, while the link is at work."""
        return self._bench.timed(
            lambda: self._halves(num_tokens), 1, warm_ups=0, rounds=times, beside=self._transferring
        )

    @contextmanager
    def _transferring(self) -> Iterator[None]:
        tickets = self._request()
        yield
        self._transfers_s.append(self._arrived(tickets))

    def _halves(self, num_tokens: int) -> list[Ticket]:
        """Submit a layer over prompts of the workload's mean length, `num_tokens` in all, half by half."""
        prompts, _, blocks = self._bench.sequences(Shape.of_prompts(num_tokens, self._prompt_tokens))
        tickets: list[Ticket] = []
        for i, (prefill, _) in enumerate(split(PassPlan(prompts, [], "profile"))):
            it = self._bench.place(assemble(i, prefill, [], blocks))
            self._bench.emit.embed(it)
            tickets += self._bench.layer(it, self._probed)
        return tickets
