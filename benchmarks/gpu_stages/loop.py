"""Measure the loop by hand on the weights, the KV cache and the prompts of the strategies' runs.

The memory is the harness's own, taken once for all stages; the loop gets plain tensors of it. Before that the loop's
tokens are compared with Hugging Face's on a tiny checkpoint, on the same device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_stages.hand_loop import Half, HandLoop, Model
from benchmarks.gpu_stages.plan import Scale
from harness.cli.overrides import composed_values
from harness.engine.engine import Engine
from harness.machine.build import load_machine
from harness.run.session import Session
from harness.settings import parse_settings
from harness.verify.reference import reference_for

_LAUNCHING_CORES = 3  # that the machine of the runs keeps from the kernels, too
_CHECKED = ("model=mixtral-tiny", "dataset.num_requests=6", "dataset.max_new_tokens=6", "kv_cache_gb=0.005")


def measure(scale: Scale, rates: Sequence[str]) -> dict[str, Any]:
    """Return what a steady decode pass takes, and how many tokens of a tiny checkpoint were right."""
    workload = [*scale.workload(), *rates, f"machine={scale.machine}"]
    checked = check(f"machine={scale.machine}")
    print(f"   tokens: {checked['exact']} of {checked['of']} as Hugging Face's", flush=True)
    with Session.of(composed_values([*workload, "model.path=random", "strategy=moelens"])) as session:
        session.load_model()
        prompts = [list(request.prompt_ids) for request in session.load_workload().requests]
        session.build_machine()
        engine = session.build_engine()
        run = Batch(engine, prompts, scale.max_new_tokens, most_tokens=scale.loop_tokens, packet_mb=scale.packet_mb)
        try:
            run.prefill()
            run.decode()  # begins behind prompts whose weights came for other passes
            taken_s = [_timed(run.decode) for _ in range(scale.decode_passes)]
            layers_bytes = sum(len(layer) for layer in run.loop.model.layers)
        finally:
            run.close()
    pass_s = sum(taken_s) / len(taken_s)
    row = {
        "sequences": len(run.prompts), "pass_s": pass_s, "passes": len(taken_s), "tok_s": len(run.prompts) / pass_s,
        "h2d_gb_s": layers_bytes / pass_s / 1e9, "kernels": "triton" if run.loop.grouped else "torch",
    }  # fmt: skip
    print(f"   {row['tok_s']:.1f} tok/s, {pass_s:.3f} s a pass, weights at {row['h2d_gb_s']:.2f} GB/s", flush=True)
    return {"tokens": checked, "decode": row}


def check(machine: str) -> dict[str, int]:
    """Generate from a tiny checkpoint by the loop and by Hugging Face; return how many sequences are alike, of how
    many."""
    sizes = ("hardware=laptop", "verify=off", "wandb.mode=disabled", "progress=false")
    settings = parse_settings(composed_values([machine, *_CHECKED, *sizes]))
    with Session(settings, load_machine(settings.machine)) as session:
        checkpoint = session.load_model().checkpoint
        assert checkpoint is not None, "a tiny model is a checkpoint"
        prompts = [list(request.prompt_ids) for request in session.load_workload().requests]
        session.build_machine()
        new_tokens = settings.dataset.max_new_tokens
        found = generated(session.build_engine(), prompts, new_tokens)
    reference = reference_for(checkpoint)
    wanted = [reference.generate(prompt, new_tokens) for prompt in prompts]
    return {"exact": sum(a == b for a, b in zip(found, wanted, strict=True)), "of": len(wanted)}


def generated(
    engine: Engine, prompts: list[list[int]], new_tokens: int, *, most_tokens: int = 64, packet_mb: float = 0.05
) -> list[list[int]]:
    """Generate for all prompts by the loop; return the tokens of each."""
    run = Batch(engine, prompts, new_tokens, most_tokens=most_tokens, packet_mb=packet_mb)
    try:
        run.prefill()
        for _ in range(new_tokens - 1):
            run.decode()
        return run.new
    finally:
        run.close()


def model_of(engine: Engine) -> Model:
    """Give the loop the engine's weights as tensors: a layer's parts lie one after another in the store."""
    store, spec, arenas = engine.store, engine.spec, engine.machine._arenas  # type: ignore[attr-defined]

    def begins(parts: dict[str, Any]) -> int:
        return int(min(part.buffer.offset_bytes for part in parts.values()))

    def layout(parts: dict[str, Any]) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {
            tensor.name if part.layout.expert is None else f"{name}.{tensor.name}": (
                part.buffer.offset_bytes - begins(parts) + tensor.offset_bytes, tensor.shape,
            )
            for name, part in parts.items()
            for tensor in part.layout.tensors
        }  # fmt: skip

    def whole(parts: dict[str, Any]) -> Tensor:
        nbytes = sum(part.buffer.nbytes for part in parts.values())
        root: Tensor = arenas.bytes_of(next(iter(parts.values())).buffer.root)
        return root[begins(parts) : begins(parts) + nbytes]

    layouts = [layout(parts) for parts in store.layers]
    assert all(each == layouts[0] for each in layouts), "the loop knows one kind of layer"
    ends = {
        tensor.name: arenas.tensor(part.buffer.root.sub(tensor.name, part.buffer.offset_bytes + tensor.offset_bytes,
                                                        tensor.nbytes), tensor.shape, tensor.dtype)
        for part in (store.embedding, store.head)
        for tensor in part.layout.tensors
    }  # fmt: skip
    return Model(
        layers=[whole(parts) for parts in store.layers], layout=layouts[0], ends=ends, num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, num_experts=spec.num_experts,
        top_k=spec.experts_per_token, norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
        max_positions=spec.max_positions,
    )  # fmt: skip


class Batch:
    """Prompts that the KV cache holds at once, and the tokens that the loop has made of them (`new`)."""

    def __init__(
        self, engine: Engine, prompts: list[list[int]], new_tokens: int, *, most_tokens: int, packet_mb: float
    ) -> None:
        cache, spec, arenas = engine.kv.host, engine.spec, engine.machine._arenas  # type: ignore[attr-defined]
        assert cache is not None, "the loop's cache lies in host memory"
        assert spec.family == "mixtral" and spec.sliding_window is None, "the loop knows Mixtral"
        self.block_size, num_blocks = cache.block_size, cache.allocator.num_blocks
        self.prompts: list[list[int]] = []
        self._tables: list[Tensor] = []
        used = 0
        for prompt in prompts:
            count = -(-(len(prompt) + new_tokens) // self.block_size)
            if used + count <= num_blocks:
                self.prompts.append(prompt)
                self._tables.append(torch.arange(used, used + count, dtype=torch.int32))
                used += count
        self.new: list[list[int]] = [[] for _ in self.prompts]
        shape = (2, num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim)
        caches = []
        for keys, _ in cache.layers:
            both = keys.root.sub("keys and values", keys.offset_bytes, 2 * keys.nbytes)
            caches.append(arenas.tensor(both, shape, spec.dtype))
        self.device = torch.device("cuda" if engine.machine.name == "cuda" else "cpu")
        longest = max(len(prompt) for prompt in self.prompts)
        self._most = max(most_tokens, longest, -(-len(self.prompts) // 2))
        self.loop = HandLoop(
            model_of(engine), caches, self.device, most_tokens=self._most, packet_bytes=int(packet_mb * 1e6),
            threads=max(1, len(os.sched_getaffinity(0)) - _LAUNCHING_CORES),
        )  # fmt: skip

    def prefill(self) -> None:
        """Run all prompts, as many at once as there is room for in two halves."""
        waiting = list(range(len(self.prompts)))
        while waiting:
            halves: list[list[int]] = [[], []]
            for half in halves:
                tokens = 0
                while waiting and tokens + len(self.prompts[waiting[0]]) <= self._most:
                    tokens += len(self.prompts[waiting[0]])
                    half.append(waiting.pop(0))
            self._run([(half, True) for half in halves if half])

    def decode(self) -> None:
        """Run one token of every sequence, in two halves."""
        middle = -(-len(self.prompts) // 2)
        numbers = list(range(len(self.prompts)))
        self._run([(half, False) for half in (numbers[:middle], numbers[middle:]) if half])

    def _run(self, halves: list[tuple[list[int], bool]]) -> None:
        with torch.inference_mode():
            logits = self.loop.run([self._half(numbers, prompts=prompts) for numbers, prompts in halves])
            for (numbers, _), found in zip(halves, logits, strict=True):
                for number, token in zip(numbers, found.argmax(-1).tolist(), strict=True):
                    self.new[number].append(token)

    def _half(self, numbers: list[int], *, prompts: bool) -> Half:
        firsts = [0 if prompts else len(self.prompts[n]) + len(self.new[n]) - 1 for n in numbers]
        ids = [self.prompts[n] if prompts else self.new[n][-1:] for n in numbers]
        contexts = torch.tensor([first + len(its) for first, its in zip(firsts, ids, strict=True)], dtype=torch.int32)
        widest = max(len(self._tables[n]) for n in numbers)
        tables = torch.zeros(len(numbers), widest, dtype=torch.int32)
        slots = []
        for row, n in enumerate(numbers):
            table = self._tables[n]
            tables[row, : len(table)] = table
            places = torch.arange(firsts[row], int(contexts[row]))
            slots.append(table[places // self.block_size].long() * self.block_size + places % self.block_size)
        positions = torch.cat([torch.arange(f, f + len(its)) for f, its in zip(firsts, ids, strict=True)])
        last = torch.tensor([len(its) for its in ids]).cumsum(0) - 1
        flat = torch.tensor([token for its in ids for token in its])
        return Half(
            ids=flat.to(self.device), positions=positions.to(self.device), last=last.to(self.device),
            slots=torch.cat(slots), tables=tables, contexts=contexts,
            prompts=[len(its) for its in ids] if prompts else None,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for the copies that are under way: they write to buffers that are given back next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _timed(run: Any) -> float:
    """Return how long a pass takes, its tokens on the host included."""
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s
