"""Decode attention against the machine's read ceiling, compilers, torch, vLLM and llama.cpp: same data, same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.conftest import Scale
from benchmarks.support import decode_data as data
from benchmarks.support.decode_data import DecodeShape
from benchmarks.support.paged_attention import PagedAttention
from benchmarks.support.peers import Peer
from benchmarks.support.rounds import Rounds
from benchmarks.support.stopwatch import Stopwatch, stopwatch
from benchmarks.support.torch_attention import TorchAttention
from kernels._extension import native

# (query heads, KV heads, shortest and longest context, in --quick too)
SHAPES = {
    "mixtral": (32, 8, 100, 700),
    "long": (32, 8, 8192, 8192),
    "group-1": (32, 32, 100, 700),
    "group-6": (48, 8, 100, 700),
    "group-8": (64, 8, 100, 700),
}
NUM_CHECKED_SEQS = 2
TILES_FROM_GROUP = 5  # query heads on a KV head; the code path "amx" takes vectors for fewer
CACHED_BYTES, NUM_SHARING = 3 << 18, 200  # K and V that fit a core's L2 cache, shared by many sequences
# Largest error over the outputs' standard deviation: float32 sums, then bfloat16 weights and outputs, then fp16 sums
TOLERANCE = {"ours": 1e-4, "C++": 1e-4, "torch": 0.1, "vllm": 0.1, "llama": 0.2}


def make_shape(name: str, scale: Scale) -> DecodeShape:
    num_heads, num_kv_heads, shortest, longest = SHAPES[name]
    token_bytes = 2 * num_kv_heads * 128 * data.KV_ITEM_BYTES
    lengths = data.ragged_lengths(shortest, longest, token_bytes, scale.working_set_bytes)
    return DecodeShape(name, num_heads, num_kv_heads, 128, lengths)


class Contest:
    """A contest has all contestants of one shape, with their outputs checked."""

    def __init__(self, shape: DecodeShape, libraries: dict[str, Any], pythons: dict[str, str]) -> None:
        self.shape = shape
        self.paged = PagedAttention(shape)
        self.torch = TorchAttention(shape)
        self.libraries = libraries
        self.peers = [Peer(name, python, "attention", shape) for name, python in pythons.items()]
        lengths = (max(1, CACHED_BYTES // shape.token_bytes),)
        self.cached = PagedAttention(replace(shape, lengths=lengths), NUM_SHARING)
        self._expected = data.expected(shape, min(NUM_CHECKED_SEQS, len(shape.lengths)))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def others(self, num_threads: int) -> dict[str, Stopwatch]:
        """Return every contestant but the chosen code path of our kernel."""
        chosen = native().isa()
        if chosen == "amx" and self.shape.group < TILES_FROM_GROUP:
            chosen = native().vector_isa()
        contestants = {
            f"ours, {isa}": self.paged.ours_on(isa, num_threads)
            for isa in native().supported_isas()
            if isa not in (chosen, "amx")
        }
        contestants |= {name: self.paged.compiled(library, num_threads) for name, library in self.libraries.items()}
        contestants |= self.torch.contestants(num_threads)
        for peer in self.peers:
            contestants |= {f"{peer.name}, {k}": peer.stopwatch(k, num_threads) for k in peer.kernels}
        return contestants

    def errors(self) -> dict[str, float]:
        """Run every contestant once and return its largest difference from float64, over the outputs' standard
        deviation."""
        found = {}
        for name, run in self.others(1).items():
            if name.startswith(("ours", "scalar", "auto")):
                self.paged.out.zero_()
                run()
                found[name] = self._error(self.paged.out.numpy())
        self.paged.out.zero_()
        self.paged.ours(1)()
        found["ours"] = self._error(self.paged.out.numpy())
        for name, run in self.torch.contestants(1).items():
            run()
            found[name] = self._error(self.torch.out.float().numpy())
        for peer in self.peers:
            found |= {f"{peer.name}, {kernel}": self._error(peer.output(kernel)) for kernel in peer.kernels}
        return found

    def _error(self, out: np.ndarray) -> float:
        return float(np.abs(out[: len(self._expected)] - self._expected).max() / self._expected.std())


@pytest.fixture(scope="module", params=list(SHAPES))
def contest(
    request: pytest.FixtureRequest, scale: Scale, baseline_libraries: dict[str, Any], peer_pythons: dict[str, str]
) -> Iterator[Contest]:
    contest = Contest(make_shape(request.param, scale), baseline_libraries, peer_pythons)
    yield contest
    contest.close()


def test_outputs(contest: Contest) -> None:
    for name, error in contest.errors().items():
        allowed = next(limit for part, limit in TOLERANCE.items() if part in name)
        assert error <= allowed, f"{name}: off by {error:.2g} standard deviations of the outputs"


def test_decode_attention(
    benchmark: Any, report: Any, contest: Contest, ceilings: Any, scale: Scale, num_threads: int
) -> None:
    others = {"read ceiling": ceilings.read(num_threads), **contest.others(num_threads)}
    others["ours, in L2"] = stopwatch(contest.cached.ours(num_threads))
    rounds = Rounds("ours", contest.paged.ours(num_threads), others, num_threads)
    rounds.measure(benchmark, scale.num_rounds)
    shape = contest.shape
    seconds = rounds.median_s("ours")
    report(
        rounds,
        kernel="decode_attention",
        shape=shape.name,
        num_threads=num_threads,
        num_seqs=len(shape.lengths),
        kv_bytes=shape.kv_bytes,
        kv_tokens_s=shape.num_tokens / seconds,
        gb_s=shape.kv_bytes / seconds / 1e9,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * shape.kv_bytes / ceilings.num_bytes,
        in_cache_gb_s=NUM_SHARING * contest.cached.shape.kv_bytes / rounds.median_s("ours, in L2") / 1e9,
        times_faster_than={
            name: rounds.ratio(name, "ours") for name in others if name not in ("read ceiling", "ours, in L2")
        },
        peers={peer.name: peer.version for peer in contest.peers},
        compiler_missing=not contest.libraries,
    )
