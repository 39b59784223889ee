"""A loop by hand over a Mixtral's layers: torch and this project's kernels, nothing of the harness.

Weights stay in pinned memory and come layer by layer into two buffers, over one copy stream, ordered by events. Keys
and values lie in host memory, where the CPU attends for tokens that decode, for one half of the batch while the GPU
works on the other. That is what MoE-Lens's pipeline does, without whatever makes it general: what its passes take more
than this loop's is the framework's price.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from kernels import triton as gpu


@dataclass(frozen=True, kw_only=True)
class Model:
    """The weights are tensors in host memory, and the dimensions those of config.json.

    layers: uint8, a contiguous piece each; layout: (offset, shape) of every tensor, the same in each layer;
    ends: embed [vocab, hidden], final_norm [hidden], lm_head [vocab, hidden]
    """

    layers: list[Tensor]
    layout: dict[str, tuple[int, tuple[int, ...]]]
    ends: dict[str, Tensor]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    norm_eps: float
    rope_theta: float
    max_positions: int


@dataclass(kw_only=True)
class Half:
    """A half of a batch goes through a layer together: whole prompts, or one token each of sequences that decode.

    ids, positions: int64 [tokens]; last: int64 [sequences], rows. On the host: slots, int64 [tokens], of keys and
    values in the cache; tables, int32 [sequences, blocks]; contexts, int32 [sequences]; prompts, the lengths of
    prompts, or None.
    """

    ids: Tensor
    positions: Tensor
    last: Tensor
    slots: Tensor
    tables: Tensor
    contexts: Tensor
    prompts: list[int] | None


class HandLoop:
    """The loop runs passes over all layers; weights of the next layer are always on their way.

    caches: keys and values in host memory by layer, each [2, blocks, kv_heads, block_size, head_dim]; most_tokens: of a
    half; threads: of the CPU's kernels; packet_bytes: of a copy
    """

    def __init__(
        self, model: Model, caches: list[Tensor], device: torch.device, *, most_tokens: int, threads: int,
        packet_bytes: int,
    ) -> None:  # fmt: skip
        self.model, self.caches, self.device = model, caches, device
        self.threads, self.packet_bytes = threads, packet_bytes
        self.is_cuda, self.dtype = device.type == "cuda", model.ends["embed"].dtype
        self.ends = {name: tensor.to(device) for name, tensor in model.ends.items()}
        most_bytes = max(len(layer) for layer in model.layers)
        self.buffers = [torch.empty(most_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.weights = [{name: self._view(each, name) for name in model.layout} for each in self.buffers]
        self.copies = torch.cuda.Stream(device) if self.is_cuda else None
        self.arrived, self.free = ([self._event() for _ in range(2)] for _ in range(2))
        self.step = 0  # layers that have begun, over all passes
        angles = torch.arange(model.max_positions)[:, None] / model.rope_theta ** (
            torch.arange(0, model.head_dim, 2) / model.head_dim
        )
        self.cos, self.sin = (table.to(device, self.dtype)[:, None] for table in (angles.cos(), angles.sin()))
        self.host: dict[tuple[int, str], Tensor] = {}
        self.grouped = gpu.serves(self.ends["embed"], "experts")
        if self.grouped:
            views = [[self._matrices(w, e) for e in range(model.num_experts)] for w in self.weights]
            self.shape = views[0][0].shape
            self.tables = [
                gpu.address_table({e: m.addresses for e, m in enumerate(each)}, model.num_experts, device)
                for each in views
            ]
            sizes = (model.top_k, model.num_experts, model.num_experts, self.shape)
            nbytes = gpu.expert_scratch_bytes(most_tokens, *sizes)
            self.scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self.is_cuda:
            torch.cuda.synchronize()  # the copy stream knows nothing of what made the buffers
        for step in range(2):
            self._fetch(step)

    def run(self, halves: list[Half]) -> list[Tensor]:
        """Run one pass; return each half's logits [sequences, vocab], on the device."""
        hidden = [F.embedding(half.ids, self.ends["embed"]) for half in halves]
        for layer in range(len(self.model.layers)):
            at = self.step % 2
            if self.is_cuda:
                torch.cuda.current_stream().wait_event(self.arrived[at])
            w, rows = self.weights[at], []
            for number, half in enumerate(halves):
                rows.append(self._project(w, hidden[number], half, number))
            for number, half in enumerate(halves):
                attended = self._attend(self.caches[layer], half, number, *rows[number])
                hidden[number] = self._behind(w, at, hidden[number], attended)
            if self.is_cuda:
                self.free[at].record()
            self._fetch(self.step + 2)
            self.step += 1
        heads = zip(hidden, halves, strict=True)
        return [self._norm(x[half.last], self.ends["final_norm"]) @ self.ends["lm_head"].T for x, half in heads]

    def _fetch(self, step: int) -> None:
        """Let the copy stream bring a step's layer into the buffer of the layer two steps before. Between the packets
        results of attention may pass."""
        source, target = self.model.layers[step % len(self.model.layers)], self.buffers[step % 2]
        with torch.cuda.stream(self.copies) if self.copies else nullcontext():
            if self.copies:
                self.copies.wait_event(self.free[step % 2])
            for start in range(0, len(source), self.packet_bytes):
                packet = source[start : start + self.packet_bytes]
                target[start : start + len(packet)].copy_(packet, non_blocking=True)
            if self.copies:
                self.arrived[step % 2].record(self.copies)

    def _project(self, w: dict[str, Tensor], hidden: Tensor, half: Half, number: int) -> tuple[Tensor, ...]:
        """Compute queries, keys and values, [tokens, heads, head_dim], and let those that the host needs go there."""
        m = self.model
        heads = (m.num_heads, m.num_kv_heads, m.num_kv_heads)
        qkv = F.linear(self._norm(hidden, w["input_norm"]), w["qkv"]).view(len(hidden), -1, m.head_dim)
        q, k, v = qkv.split(heads, dim=1)
        cos, sin = self.cos[half.positions], self.sin[half.positions]
        found = _rotated(q, cos, sin), _rotated(k, cos, sin), v.contiguous()
        on_host = [self._brought(each, number, name) for each, name in zip(found, "qkv", strict=True)]
        event = self._event()
        if self.is_cuda:
            event.record()
        return (*found, *on_host, event)

    def _attend(self, cache: Tensor, half: Half, number: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """Attend on the device within prompts, or on the host over the cache; results [tokens, heads * head_dim]."""
        host_q, host_k, host_v, event = rest
        scale, out = self.model.head_dim**-0.5, torch.empty_like(q)
        if half.prompts is not None:
            if gpu.serves(q, "prefill"):
                gpu.causal_attention(q, k, v, half.positions, out, scale=scale)
            else:
                out = torch.cat([_causal(*of) for of in zip(*(x.split(half.prompts) for x in (q, k, v)), strict=True)])
        if self.is_cuda:
            event.synchronize()
        kernels.kv_append(host_k, host_v, cache[0], cache[1], half.slots, num_threads=self.threads)
        if half.prompts is None:
            host_out = self._pinned(number, "out", q)
            options = {"scale": scale, "num_threads": self.threads}
            kernels.decode_attention(host_q, *cache, half.tables, half.contexts, host_out, **options)
            out.copy_(host_out, non_blocking=True)
        return out.flatten(1)

    def _behind(self, w: dict[str, Tensor], at: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute what comes behind attention: projection, router, experts."""
        m = self.model
        hidden = hidden + F.linear(attended, w["o"])
        x = self._norm(hidden, w["post_norm"])
        logits = F.linear(x, w["router"])
        if gpu.serves(logits, "routing"):
            ids, weights = gpu.choose_experts(logits, m.top_k)
        else:
            weights, ids = logits.float().softmax(-1).topk(m.top_k)
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.grouped:
            tables = self.tables[at]
            gpu.grouped_experts(
                x, ids, weights, total, tables, self.shape, num_present=m.num_experts, scratch=self.scratch
            )
        else:
            for expert in range(m.num_experts):
                tokens, choices = (ids == expert).nonzero(as_tuple=True)
                gate, up = F.linear(x[tokens], w[f"expert.{expert}.gate_up"]).chunk(2, dim=-1)
                y = F.linear(F.silu(gate) * up, w[f"expert.{expert}.down"])
                total.index_add_(0, tokens, y.float() * weights[tokens, choices, None])
        return hidden + total.to(hidden.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.model.norm_eps)).to(x.dtype)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        start, shape = self.model.layout[name]
        return buffer[start : start + prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)

    def _matrices(self, w: dict[str, Tensor], expert: int) -> Any:
        gate, up = w[f"expert.{expert}.gate_up"].chunk(2)
        return gpu.ExpertMatrices(gate=gate, up=up, down=w[f"expert.{expert}.down"])

    def _event(self) -> Any:
        return torch.cuda.Event() if self.is_cuda else None

    def _brought(self, rows: Tensor, number: int, name: str) -> Tensor:
        return self._pinned(number, name, rows).copy_(rows, non_blocking=True)

    def _pinned(self, number: int, name: str, like: Tensor) -> Tensor:
        """Return host memory for a half's rows, which is taken once."""
        held = self.host.get((number, name))
        if held is None or len(held) < len(like):
            held = torch.empty(like.shape, dtype=like.dtype, pin_memory=self.is_cuda)
            self.host[number, name] = held
        return held[: len(like)]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one prompt: q [tokens, heads, head_dim], k and v with fewer heads."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
