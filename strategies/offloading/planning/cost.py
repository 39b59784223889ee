"""MoE-Lightning's performance model gives the time of a layer under a policy (Eq. 12-14), from the rates of an HRM.

Resources work at the same time, so a layer takes as long as the busiest of them (Eq. 12); a resource's tasks follow
each other (Eq. 13); a task takes as long as the slowest of its roofs (Eq. 14). The paper counts attention and experts
only. Here projections, router and shared experts are part of the FFN's GPU work, and the link's work includes what
attention on the CPU sends back and what the CPU's experts exchange. Copies to the host (`offload`) and the staging of
pageable weights (`pin`) are counted too, each a resource of its own. Embedding and head are left out.

There are three extensions. Where `Rates` does not have what they need, they are absent, and the model is the paper's.
*Cost of ops*: each op takes a fixed time on its lane, whatever its roofs say (launch, dispatch, latency of a copy).
This is one more task of that resource: T_x = (Eq. 13's sum) + n_x c_x, with n_x ops a layer. *Host memory* is a
resource like the others, for all that crosses it: staging copies (which read and write), the links' copies, attention
and experts on the CPU. *Rates at the policy's sizes*: products of few tokens and attention among prompts reach fewer
FLOP/s than the roof of many tokens; a prediction takes those of the sizes that the policy has. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.memory.tiers import PAGEABLE, PINNED
from harness.model.spec import ModelSpec
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.linear_terms import BATCH, DEVICE_SEQUENCES, MICRO_BATCHES, Linear
from strategies.offloading.planning.memory import Deployment, Switches, streamed_bytes
from strategies.offloading.planning.policy import Policy

Overlap = Literal["all", "weights apart", "nothing", "one thread"]


@dataclass(frozen=True, kw_only=True)
class OpSeconds:
    """The seconds that one op takes on a lane beyond its roofs; 0 as in the paper."""

    gpu: float = 0.0
    cpu: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SizedFlops:
    """The FLOP/s that a GPU reaches at the sizes of one policy, without the fixed cost of its ops.

    They are those of a layer's matrices over a micro-batch of decode and over a part of a prefill, and those of
    attention among the prompts of such a part.
    """

    decode: float
    prefill: float
    prefill_attention: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """An HRM of two levels, with the rates that each kind of task achieves.

    A rate is None where its resource is free. The last three fields belong to the extensions.
    """

    gpu: Level
    cpu_attention: Level
    cpu_ffn: Level
    h2d_bytes_s: float  # B^{cpu,gpu}
    d2h_bytes_s: float
    pin_bytes_s: float | None = None  # bytes copied, pageable to pinned
    peer_bytes_s: float | None = None  # between GPUs that share a layer, as a sum over all of them achieves
    op_s: OpSeconds = OpSeconds()
    host_bytes_s: float | None = None  # of host memory, for all that use it together
    sized: SizedFlops | None = None  # in place of the GPU's FLOP/s, for one policy; the search has none

    @property
    def extends_paper(self) -> bool:
        return self.op_s != OpSeconds() or self.host_bytes_s is not None or self.sized is not None

    def gpu_at(self, kind: Literal["decode", "prefill", "prefill_attention"]) -> Level:
        """Return what the GPU reaches in this kind of work."""
        return self.gpu if self.sized is None else replace(self.gpu, flops_s=getattr(self.sized, kind))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task is one step of a layer on one resource. `roofs` are seconds by what limits them; the largest counts."""

    name: str
    roofs: Mapping[str, Linear]

    def seconds(self, policy: Policy) -> float:
        return max(roof.at(policy) for roof in self.roofs.values())  # Eq. 14

    def __truediv__(self, divisor: float) -> Task:
        return Task(name=self.name, roofs={name: roof / divisor for name, roof in self.roofs.items()})


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """The tasks of one layer by resource: its `own`, and in `resources` also those of others that it waits for."""

    resources: Mapping[str, Sequence[Task]]
    own: Mapping[str, Sequence[Task]]

    def by_resource(self, policy: Policy) -> dict[str, float]:
        """Return the seconds that each resource is busy, or waits for what the schedule puts before its work."""
        return {name: sum(task.seconds(policy) for task in tasks) for name, tasks in self.resources.items()}  # Eq. 13

    def seconds(self, policy: Policy) -> float:
        return max(self.by_resource(policy).values())  # Eq. 12

    def bottleneck(self, policy: Policy) -> str:
        """Return the resource with the most work of its own, with its longest task and that task's roof. What it waits
        for is the work of another one: a GPU that waits for weights is bound by the link (h2d)."""
        name = max(self.own, key=lambda resource: sum(task.seconds(policy) for task in self.own[resource]))
        task = max(self.own[name], key=lambda one: one.seconds(policy))
        roof = max(task.roofs, key=lambda one: task.roofs[one].at(policy))
        return f"{name} ({task.name}, {roof})"


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The times of a layer; `overlap` says what the pipeline overlaps.

    "all": all resources work at the same time (CGOPipe). "weights apart": a layer's weights cross the link as one
    block, and what computing waits for stands behind it (MoE-Lightning Fig. 6, S2 and S4). "nothing": weights cross the
    link in the same way, and CPU and GPU take turns (S3): each GPU of a pipeline with the CPU's work for its own batch,
    while the CPU works for the others. Prefill waits for nothing on the link but weights. "one thread": staging copies,
    those of relayed keys and values too, take turns with the GPU and the CPU, in prefill as well (FlexGen as built);
    each GPU of a pipeline has such a thread, and again the CPU works for the others' batches meanwhile.

    Where several GPUs share every layer, each has its own link and does its share of the work; CPU and staging copies
    serve all of them, and the GPUs' partial sums meet twice a layer.
    """

    deployment: Deployment
    rates: Rates
    overlap: Overlap = "all"

    def decode(self, switches: Switches) -> LayerTime:
        """Return the time of one layer of a decode step, at the mean context.

        Step i of 1 .. n - 1 sees s + i tokens. Sequences whose KV cache is on the device are attended to there,
        whatever A_g says.
        """
        d, rates = self.deployment, self.rates
        spec, on_host = d.spec, BATCH - DEVICE_SEQUENCES
        row_bytes = spec.dtype_bytes
        context = mean_seen_tokens(spec, d.shape.prompt_tokens + d.shape.new_tokens / 2)
        kv_bytes, flops = context * spec.kv_bytes_per_token_layer, context * spec.decode_pair_flops
        attending = BATCH if switches.gpu_attention else DEVICE_SEQUENCES  # on the GPU
        to_gpu = {"weights": streamed_bytes(d.sizes, gpu_ffn=switches.gpu_ffn)}
        to_host = {"kv": on_host * spec.kv_bytes_per_token_layer}
        on_gpu = [_roofs("attention", rates.gpu, flops=attending * flops, nbytes=attending * kv_bytes)]
        on_cpu, cpu_bytes = [], d.num_gpus * on_host * (2 * spec.kv_bytes_per_token_layer)  # new keys and values
        if switches.gpu_attention:
            to_gpu["kv"] = on_host * kv_bytes
        else:
            to_gpu["attention results"] = on_host * (spec.cached_o_dim * row_bytes)
            to_host["queries"] = on_host * (spec.cached_q_dim * row_bytes)
            attended = d.num_gpus * on_host
            on_cpu.append(_roofs("attention", rates.cpu_attention, flops=attended * flops, nbytes=attended * kv_bytes))
            cpu_bytes += attended * kv_bytes
        ffn = _ffn(d, BATCH, switches.micro_batch_size, MICRO_BATCHES, with_experts=switches.gpu_ffn)
        on_gpu.append(
            _roofs("ffn", rates.gpu_at("decode"), *ffn) if switches.gpu_ffn else _roofs("projections", rates.gpu, *ffn)
        )
        on_gpu += self._sums(BATCH)
        if not switches.gpu_ffn:
            needed, nbytes = _experts(d, BATCH, switches.micro_batch_size, MICRO_BATCHES)
            on_cpu.append(_roofs("experts", rates.cpu_ffn, d.num_gpus * needed, d.num_gpus * nbytes))
            cpu_bytes += d.num_gpus * nbytes
            to_gpu["expert sums"] = BATCH * (spec.hidden_dim * 4)
            to_host["expert inputs"] = BATCH * (spec.hidden_dim * row_bytes + 12 * spec.experts_per_token)
        return self._layer(to_gpu, to_host, on_gpu, on_cpu, cpu_bytes, ops_of_decode(d, switches), in_decode=True)

    def prefill(self, switches: Switches) -> LayerTime:
        """Return the time of one layer over all prompts, micro-batch by micro-batch.

        The GPU computes everything, and the KV cache goes to the host.
        """
        d, rates = self.deployment, self.rates
        spec, s = d.spec, d.shape.prompt_tokens
        tokens = BATCH * s
        kv = (BATCH - DEVICE_SEQUENCES) * (s * spec.kv_bytes_per_token_layer)
        to_gpu = {"weights": streamed_bytes(d.sizes, gpu_ffn=switches.gpu_ffn, prefill=True)}
        to_host = {"kv": kv}
        if waits_on_host := d.storage.prefill_hidden_tier == PINNED:
            to_gpu["hidden states"] = to_host["hidden states"] = tokens * (spec.hidden_dim * spec.dtype_bytes)
        pairs = BATCH * (s * mean_seen_tokens(spec, (s + 1) / 2))
        moved = tokens * (spec.prompt_row_dim * spec.dtype_bytes)
        part_tokens = d.prefill_tokens(switches.micro_batch_size)
        is_whole = part_tokens >= d.shape.prompts_of(switches.micro_batch_size)
        num_parts = MICRO_BATCHES if is_whole else tokens / part_tokens
        on_gpu = [
            _roofs("attention", rates.gpu_at("prefill_attention"), flops=pairs * spec.prefill_pair_flops, nbytes=moved),
            _roofs("ffn", rates.gpu_at("prefill"), *_ffn(d, tokens, part_tokens, num_parts, with_experts=True)),
            *self._sums(tokens),
        ]
        ops = ops_of_prefill(d, num_parts, hidden_waits_on_host=waits_on_host)
        return self._layer(to_gpu, to_host, on_gpu, [], 2 * d.num_gpus * kv, ops, in_decode=False)

    def _layer(
        self,
        to_gpu: Mapping[str, Linear],
        to_host: Mapping[str, Linear],
        on_gpu: list[Task],
        on_cpu: list[Task],
        cpu_bytes: Linear,
        ops: Mapping[str, Linear],
        *,
        in_decode: bool,
    ) -> LayerTime:
        """Combine the tasks of one layer on all resources.

        `to_gpu` and `to_host` are the bytes that cross the link of each GPU, and `cpu_bytes` those that the CPU reads
        and writes. `ops` is the number of ops of each lane, without those for pages of weights.
        """
        rates, op_s = self.rates, self.rates.op_s
        pages = MICRO_BATCHES if self.overlap in ("all", "one thread") else Linear(1.0)
        link = [_task(name, link=nbytes / rates.h2d_bytes_s) for name, nbytes in to_gpu.items()]
        offload = [_task(name, link=nbytes / rates.d2h_bytes_s) for name, nbytes in to_host.items()]
        apart = [link[0]] if self.overlap in ("weights apart", "nothing") and in_decode else []
        on_gpu, on_cpu = [*on_gpu, *_fixed(op_s.gpu, ops["gpu"])], [*on_cpu, *_fixed(op_s.cpu, ops["cpu"])]
        resources = {
            "link": [*link, *_fixed(op_s.h2d, ops["h2d"] + pages)],
            "offload": [*offload, *_fixed(op_s.d2h, ops["d2h"])],
        }
        copied = ["weights"] if self._is_staged else []
        copied += ["kv"] if self.deployment.storage.relays_kv and "kv" in to_gpu else []
        pin = [_task(name, link=to_gpu[name] / rates.pin_bytes_s) for name in copied if rates.pin_bytes_s is not None]
        own = {"h2d": resources["link"], "d2h": resources["offload"], "gpu": on_gpu, "cpu": on_cpu, "pin": pin}
        own["host memory"] = self._host_memory(to_gpu, to_host, cpu_bytes, copied)
        in_flight = self.deployment.blocks_in_flight
        if self.overlap in ("one thread", "nothing"):
            waited_for = on_cpu if in_decode or self.overlap == "nothing" else []
            copies = pin if self.overlap == "one thread" else apart
            name = "copies, gpu and cpu in turn" if self.overlap == "one thread" else "gpu and cpu in turn"
            resources[name] = [*copies, *on_gpu, *(task / in_flight for task in waited_for)]
            resources |= {"cpu": on_cpu} if in_flight > 1 else {}
        else:
            resources |= {"gpu": [*apart, *on_gpu] if on_gpu else [], "cpu": [*apart, *on_cpu] if on_cpu else []}
        if pin:
            resources["pin"] = pin
        resources["host memory"] = own["host memory"]
        return LayerTime(resources=_with_tasks(resources), own=_with_tasks(own))

    @property
    def _is_staged(self) -> bool:
        return self.deployment.storage.weights_tier == PAGEABLE

    def _host_memory(
        self, to_gpu: Mapping[str, Linear], to_host: Mapping[str, Linear], cpu_bytes: Linear, copied: Sequence[str]
    ) -> list[Task]:
        """Return a task for each kind of data that crosses host memory, all one after the other. What is `copied` into
        pinned memory crosses it three times.

        GPUs that share layers have the same hidden states, which only one of them copies to the host.
        """
        d, host_bytes_s = self.deployment, self.rates.host_bytes_s
        if host_bytes_s is None:
            return []
        times = {name: d.blocks_in_flight if name == "hidden states" else d.num_gpus for name in to_host}
        crossing = {
            "staging": 2 * d.num_gpus * sum((to_gpu[name] for name in copied), Linear()),
            "to the GPU": d.num_gpus * sum(to_gpu.values(), Linear()),
            "from the GPU": sum((times[name] * nbytes for name, nbytes in to_host.items()), Linear()),
            "cpu": cpu_bytes,
        }
        return [_task(name, memory=nbytes / host_bytes_s) for name, nbytes in crossing.items() if nbytes != Linear()]

    def _sums(self, tokens: Linear) -> list[Task]:
        """Return the task of adding up the partial sums of O projection and experts over all GPUs.

        This takes two rings: with R GPUs, each GPU sends 2 (R - 1) / R of the sums in each. No task is returned where
        no GPUs share layers.
        """
        spec, num_gpus = self.deployment.spec, self.deployment.num_gpus
        if not _shares_layers(self.deployment):
            return []
        assert self.rates.peer_bytes_s is not None, "GPUs that share layers have a rate between them"
        sent_bytes = 2 * 2 * (num_gpus - 1) / num_gpus * spec.hidden_dim * spec.dtype_bytes
        return [_task("sums over GPUs", link=tokens * (sent_bytes / self.rates.peer_bytes_s))]


def ops_of_decode(d: Deployment, switches: Switches) -> dict[str, Linear]:
    """Return by lane the number of ops that a layer of a decode step has for its micro-batches.

    The ops are {norm, QKV}, {O, router}, experts and their sum, and attention, on the lane where it is. Attention over
    a cache in device memory is left out, as the number of micro-batches with such sequences is not linear.
    """
    on_gpu = 3 + switches.gpu_ffn + switches.gpu_attention + _shares_layers(d)
    on_cpu = 2 - switches.gpu_attention + (not switches.gpu_ffn)  # new keys, attention
    exchanged = 1 + (not switches.gpu_ffn)  # attention's, and the experts'
    return {
        "gpu": on_gpu * MICRO_BATCHES,
        "cpu": d.num_gpus * on_cpu * MICRO_BATCHES,
        "h2d": exchanged * MICRO_BATCHES,
        "d2h": exchanged * MICRO_BATCHES,
    }


def ops_of_prefill(d: Deployment, num_parts: Linear, *, hidden_waits_on_host: bool) -> dict[str, Linear]:
    """Return by lane the number of ops that a layer of the prefill has, which goes in `num_parts`."""
    return {
        "gpu": (5 + _shares_layers(d)) * num_parts,
        "cpu": d.num_gpus * num_parts,
        "h2d": int(hidden_waits_on_host) * num_parts,
        "d2h": (1 + hidden_waits_on_host) * num_parts,
    }


def _shares_layers(d: Deployment) -> bool:
    return d.num_gpus > d.blocks_in_flight


def _with_tasks(resources: Mapping[str, list[Task]]) -> dict[str, list[Task]]:
    return {name: tasks for name, tasks in resources.items() if tasks}


def _fixed(op_s: float, num_ops: Linear) -> list[Task]:
    return [_task("ops", fixed=op_s * num_ops)] if op_s and num_ops != Linear() else []


def mean_seen_tokens(spec: ModelSpec, context: float) -> float:
    """Return the tokens of a context that a query sees, as a mean over the layers: fewer where a window slides."""
    seen = [min(context, spec.seen_tokens(layer, spec.max_positions)) for layer in range(spec.num_layers)]
    return sum(seen) / len(seen)


def _task(name: str, **roofs: Linear) -> Task:
    return Task(name=name, roofs=roofs)


def _roofs(name: str, level: Level, flops: Linear, nbytes: Linear) -> Task:
    """Return a task on data of its own level (HRM Eq. 8, as time)."""
    return _task(name, compute=flops / level.flops_s, memory=nbytes / level.bytes_s)


def _ffn(
    d: Deployment, tokens: Linear, part_tokens: float, num_parts: Linear, *, with_experts: bool
) -> tuple[Linear, Linear]:
    """Return FLOPs and bytes of a layer's matrices over `num_parts` parts of `part_tokens` tokens.

    Each part reads once more the weights that its tokens reach. The last part may have fewer tokens, which saves FLOPs
    but no weights.
    """
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
