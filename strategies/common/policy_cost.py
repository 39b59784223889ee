"""MoE-Lightning's performance model: the time of a layer under a policy (Eq. 12-14), from the rates of an HRM.

Resources work side by side, so a layer takes as long as the busiest of them (Eq. 12); a resource's tasks follow each
other (Eq. 13); a task takes as long as the slowest of its roofs (Eq. 14). Beyond the paper, which counts attention and
experts only: projections, router and shared experts are part of the FFN's GPU work, what attention on the CPU sends
back and what the CPU's experts exchange are part of the link's, and so are copies to the host (`offload`) and the
staging of pageable weights (`pin`), each a resource of its own. Embedding and head are left out. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.model.spec import ModelSpec
from strategies.common.hrm import Level
from strategies.common.linear_terms import BATCH, DEVICE_SEQUENCES, MICRO_BATCHES, Linear
from strategies.common.offload_memory import Deployment, Switches, streamed_bytes
from strategies.common.policy import Policy

Overlap = Literal["all", "weights apart", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """An HRM of two levels, with the rates that each kind of task achieves; None where a resource is free."""

    gpu: Level
    cpu_attention: Level
    cpu_ffn: Level
    h2d_bytes_s: float  # B^{cpu,gpu}
    d2h_bytes_s: float
    pin_bytes_s: float | None = None  # bytes copied, pageable to pinned
    peer_bytes_s: float | None = None  # between GPUs that share a layer, as a sum over all of them achieves


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step of a layer on one resource. `roofs` are seconds by what limits them; the largest counts."""

    name: str
    roofs: Mapping[str, Linear]

    def seconds(self, policy: Policy) -> float:
        return max(roof.at(policy) for roof in self.roofs.values())  # Eq. 14


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Tasks of one layer by resource."""

    resources: Mapping[str, Sequence[Task]]

    def by_resource(self, policy: Policy) -> dict[str, float]:
        """Seconds that each is busy."""
        return {name: sum(task.seconds(policy) for task in tasks) for name, tasks in self.resources.items()}  # Eq. 13

    def seconds(self, policy: Policy) -> float:
        return max(self.by_resource(policy).values())  # Eq. 12

    def bottleneck(self, policy: Policy) -> str:
        """The busiest resource, with its longest task and that task's roof."""
        busy = self.by_resource(policy)
        name = max(busy, key=lambda resource: busy[resource])
        task = max(self.resources[name], key=lambda one: one.seconds(policy))
        roof = max(task.roofs, key=lambda one: task.roofs[one].at(policy))
        return f"{name} ({task.name}, {roof})"


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """`overlap` is the pipeline's. "all": every resource works beside the others (CGOPipe). "weights apart": a layer's
    weights cross the link as one block, and what computing waits for stands behind it (MoE-Lightning Fig. 6, S2 and
    S4). "nothing": so they do, and CPU and GPU take turns (S3). Prefill waits for nothing on the link but weights.

    Of several GPUs that share every layer each has its own link and does its share of the work; CPU and staging copies
    serve all of them, and the GPUs' partial sums meet twice a layer.
    """

    deployment: Deployment
    rates: Rates
    overlap: Overlap = "all"

    def decode(self, switches: Switches) -> LayerTime:
        """One layer of a decode step, at the mean context: step i of 1 .. n - 1 sees s + i tokens. Whose KV cache is on
        the device is attended to there, whatever A_g says."""
        d, rates = self.deployment, self.rates
        spec, on_host = d.spec, BATCH - DEVICE_SEQUENCES
        row_bytes = spec.dtype_bytes
        context = mean_seen_tokens(spec, d.shape.prompt_tokens + d.shape.new_tokens / 2)
        kv_bytes, flops = context * spec.kv_bytes_per_token_layer, context * spec.decode_pair_flops
        attending = BATCH if switches.gpu_attention else DEVICE_SEQUENCES  # on the GPU
        weights = streamed_bytes(d.sizes, gpu_ffn=switches.gpu_ffn)
        to_gpu = [_task("weights", link=weights / rates.h2d_bytes_s)]
        to_host = [_task("kv", link=on_host * spec.kv_bytes_per_token_layer / rates.d2h_bytes_s)]
        on_gpu = [_roofs("attention", rates.gpu, flops=attending * flops, nbytes=attending * kv_bytes)]
        on_cpu = []
        if switches.gpu_attention:
            to_gpu.append(_task("kv", link=on_host * kv_bytes / rates.h2d_bytes_s))
        else:
            results, queries = (on_host * (dim * row_bytes) for dim in (spec.cached_o_dim, spec.cached_q_dim))
            to_gpu.append(_task("attention results", link=results / rates.h2d_bytes_s))
            to_host.append(_task("queries", link=queries / rates.d2h_bytes_s))
            attended = d.num_gpus * on_host
            on_cpu.append(_roofs("attention", rates.cpu_attention, flops=attended * flops, nbytes=attended * kv_bytes))
        ffn = _ffn(d, BATCH, switches.micro_batch_size, MICRO_BATCHES, with_experts=switches.gpu_ffn)
        on_gpu.append(_roofs("ffn" if switches.gpu_ffn else "projections", rates.gpu, *ffn))
        on_gpu += self._sums(BATCH)
        if not switches.gpu_ffn:
            needed, nbytes = _experts(d, BATCH, switches.micro_batch_size, MICRO_BATCHES)
            on_cpu.append(_roofs("experts", rates.cpu_ffn, d.num_gpus * needed, d.num_gpus * nbytes))
            input_bytes = spec.hidden_dim * row_bytes + 12 * spec.experts_per_token
            to_gpu.append(_task("expert sums", link=BATCH * (spec.hidden_dim * 4) / rates.h2d_bytes_s))
            to_host.append(_task("expert inputs", link=BATCH * input_bytes / rates.d2h_bytes_s))
        return self._layer(to_gpu, to_host, on_gpu, on_cpu, weights=weights, in_decode=True)

    def prefill(self, switches: Switches) -> LayerTime:
        """One layer over all prompts, micro-batch by micro-batch; everything on the GPU, the KV cache to the host."""
        d, rates = self.deployment, self.rates
        spec, s = d.spec, d.shape.prompt_tokens
        weights = streamed_bytes(d.sizes, gpu_ffn=switches.gpu_ffn, prefill=True)
        tokens = BATCH * s
        kv = (BATCH - DEVICE_SEQUENCES) * (s * spec.kv_bytes_per_token_layer)
        to_gpu = [_task("weights", link=weights / rates.h2d_bytes_s)]
        to_host = [_task("kv", link=kv / rates.d2h_bytes_s)]
        if d.storage.prefill_hidden_tier == "pinned":
            hidden = tokens * (spec.hidden_dim * spec.dtype_bytes)
            to_gpu.append(_task("hidden states", link=hidden / rates.h2d_bytes_s))
            to_host.append(_task("hidden states", link=hidden / rates.d2h_bytes_s))
        pairs = BATCH * (s * mean_seen_tokens(spec, (s + 1) / 2))
        moved = tokens * ((spec.q_dim + 2 * spec.kv_dim + spec.o_dim) * spec.dtype_bytes)
        part_tokens = d.prefill_tokens(switches.micro_batch_size)
        is_whole = part_tokens >= d.shape.prompts_of(switches.micro_batch_size)
        num_parts = MICRO_BATCHES if is_whole else tokens / part_tokens
        on_gpu = [
            _roofs("attention", rates.gpu, flops=pairs * spec.prefill_pair_flops, nbytes=moved),
            _roofs("ffn", rates.gpu, *_ffn(d, tokens, part_tokens, num_parts, with_experts=True)),
            *self._sums(tokens),
        ]
        return self._layer(to_gpu, to_host, on_gpu, [], weights=weights, in_decode=False)

    def _layer(
        self,
        to_gpu: list[Task],
        to_host: list[Task],
        on_gpu: list[Task],
        on_cpu: list[Task],
        *,
        weights: Linear,
        in_decode: bool,
    ) -> LayerTime:
        """The first task of `to_gpu` brings the weights."""
        resources = {"link": to_gpu, "offload": to_host}
        apart = [] if self.overlap == "all" or not in_decode else to_gpu[:1]
        if self.overlap == "nothing":
            resources["gpu and cpu in turn"] = [*apart, *on_gpu, *on_cpu]
        else:
            resources |= {"gpu": [*apart, *on_gpu] if on_gpu else [], "cpu": [*apart, *on_cpu] if on_cpu else []}
        if self.deployment.storage.weights_tier == "host" and self.rates.pin_bytes_s is not None:
            resources["pin"] = [_task("weights", link=self.deployment.num_gpus * weights / self.rates.pin_bytes_s)]
        return LayerTime(resources={name: tasks for name, tasks in resources.items() if tasks})

    def _sums(self, tokens: Linear) -> list[Task]:
        """Partial sums of O projection and experts over all GPUs: two rings; each GPU sends 2 (R - 1) / R of it."""
        spec, num_gpus = self.deployment.spec, self.deployment.num_gpus
        if num_gpus == self.deployment.blocks_in_flight:
            return []
        assert self.rates.peer_bytes_s is not None, "GPUs that share layers have a rate between them"
        sent_bytes = 2 * 2 * (num_gpus - 1) / num_gpus * spec.hidden_dim * spec.dtype_bytes
        return [_task("sums over GPUs", link=tokens * (sent_bytes / self.rates.peer_bytes_s))]


def mean_seen_tokens(spec: ModelSpec, context: float) -> float:
    """Tokens of a context that a query sees, over the layers: fewer where a window slides."""
    seen = [min(context, spec.seen_tokens(layer, spec.max_positions)) for layer in range(spec.num_layers)]
    return sum(seen) / len(seen)


def _task(name: str, **roofs: Linear) -> Task:
    return Task(name=name, roofs=roofs)


def _roofs(name: str, level: Level, flops: Linear, nbytes: Linear) -> Task:
    """A task on data of its own level (HRM Eq. 8, as time)."""
    return _task(name, compute=flops / level.flops_s, memory=nbytes / level.bytes_s)


def _ffn(
    d: Deployment, tokens: Linear, part_tokens: float, num_parts: Linear, *, with_experts: bool
) -> tuple[Linear, Linear]:
    """FLOPs and bytes of a layer's matrices over `num_parts` of `part_tokens`. Each part reads the weights that its
    tokens reach once more; what the last one lacks in tokens it saves in FLOPs, not in weights."""
    spec, sizes = d.spec, d.sizes
    flops, nbytes = _experts(d, tokens, part_tokens, num_parts) if with_experts else (Linear(), Linear())
    expert_flops = 2 * spec.experts_per_token * spec.expert_params
    flops += tokens * (spec.flops_per_token_layer - expert_flops)
    return flops, nbytes + num_parts * (sizes.layer_bytes - sizes.experts_bytes)


def _experts(d: Deployment, tokens: Linear, part_tokens: float, num_parts: Linear) -> tuple[Linear, Linear]:
    spec = d.spec
    missed = (1 - spec.experts_per_token / spec.num_experts) ** part_tokens  # experts without a token, if even
    flops = tokens * (2 * spec.experts_per_token * spec.expert_params)
    return flops, num_parts * (d.sizes.experts_bytes * (1 - missed))
