"""A plain greedy generator on the family functions: whole model in memory, one sequence at a time.

What the tests compare with Hugging Face, and where they plant faults: a fault is a function that the layer loop calls
at the place where a scheduler could go wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from harness.model.checkpoint import Checkpoint, part_views
from harness.verify.records import GeneratedSequence, Segment

NUM_TOKENS = 24


def same(*values):
    return values if len(values) > 1 else values[0]


@dataclass
class Fault:
    """Each does nothing by default; a test replaces one of them."""

    expert_weights: Callable = same  # (layer, expert) -> whose weights run instead
    position: Callable = same  # a token's position -> the one that RoPE gets
    kv: Callable = lambda layer, k, v: (k, v)  # what decode attention sees, [kv_heads, context, head_dim]
    routes: Callable = lambda layer, ids: ids  # expert ids [tokens, k]
    pick: Callable = lambda logits: int(logits.argmax())  # the next token


class PlainGenerator:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec, self.family = checkpoint.spec, checkpoint.family
        self.weights = {}
        for layer, part in checkpoint.parts():
            region = torch.empty(part.nbytes, dtype=torch.uint8)
            checkpoint.read_part(layer, part, region)
            self.weights[layer, part.name] = part_views(part, region)

    @torch.inference_mode()
    def generate(self, request_id, prompt_ids, num_tokens, fault=None, preempt_after=()):
        """Generate tokens; after each number of tokens in `preempt_after` the KV cache is dropped and rebuilt by a
        prefill of all tokens."""
        fault, generated, segments = fault or Fault(), [], []
        for end in [*preempt_after, num_tokens]:
            first, caches, routing = len(generated), [None] * self.spec.num_layers, []
            new_ids, start = [*prompt_ids, *generated], 0
            while len(generated) < end:
                positions = torch.tensor([fault.position(p) for p in range(start, start + len(new_ids))])
                logits, routes = self._forward(torch.tensor(new_ids), positions, caches, fault)
                routing.append(routes)
                generated.append(fault.pick(logits))
                start, new_ids = start + len(new_ids), generated[-1:]
            segments.append(Segment(first_generated_index=first, routing=np.concatenate(routing)))
        return GeneratedSequence(
            request_id=request_id, prompt_ids=prompt_ids, generated_ids=generated, segments=segments
        )

    def _forward(self, token_ids, positions, caches, fault):
        """Run one step of one sequence: prefill if the caches are empty, else decode. Returns last logits and
        routing."""
        spec, family, routes = self.spec, self.family, []
        hidden = family.embed(spec, self.weights[None, "embedding"], token_ids)
        for layer in range(spec.num_layers):
            q, k, v = family.attention_in(spec, self.weights[layer, "attention_in"], hidden, positions, layer)
            attn = self._attend(layer, q, k, v, caches, fault)
            w = self.weights[layer, "attention_out"]
            found = family.after_attention(spec, w, family.output_projection(spec, w, attn, layer), hidden, layer)
            hidden = found.residual if found.common is None else found.residual + found.common
            if found.expert_ids is None:
                continue
            ids = fault.routes(layer, found.expert_ids)
            routes.append(ids)
            hidden = hidden + self._experts(layer, found.normed, ids, found.expert_weights, fault)
        logits = family.head(spec, self.weights[None, "head"], hidden[-1:])
        return logits[0], torch.stack(routes, dim=1).numpy().astype(np.int16)  # [tokens, layers with a router, k]

    def _attend(self, layer, q, k, v, caches, fault):
        w = self.weights.get((layer, "attention"), {})
        new = (k.transpose(0, 1), v.transpose(0, 1))  # [kv_heads, tokens, head_dim]
        if caches[layer] is None:
            caches[layer] = new
            return self.family.prefill_attention(self.spec, w, q, k, v, [q.shape[0]], layer)
        caches[layer] = tuple(torch.cat(pair, dim=1) for pair in zip(caches[layer], new, strict=True))
        seen_k, seen_v = fault.kv(layer, *caches[layer])
        return self.family.decode_attention(self.spec, w, q[0], seen_k, seen_v, seen_k.shape[1], layer)[None]

    def _experts(self, layer, normed, ids, expert_weights, fault):
        out = torch.zeros_like(normed)
        for expert in ids.unique().tolist():
            tokens, slot = (ids == expert).nonzero(as_tuple=True)
            from_layer, from_expert = fault.expert_weights(layer, expert)
            y = self.family.expert(self.spec, self.weights[from_layer, f"expert.{from_expert}"], normed[tokens])
            out.index_add_(0, tokens, (y * expert_weights[tokens, slot, None]).to(out.dtype))
        return out


def generate(checkpoint, prompts, fault=None, num_tokens=NUM_TOKENS, preempt_after=()):
    generator = PlainGenerator(checkpoint)
    return [generator.generate(i, ids, num_tokens, fault, preempt_after) for i, ids in enumerate(prompts)]


def edited(checkpoint, folder, change):
    """Copy a one-file checkpoint with its tensors changed."""
    folder.mkdir()
    for path in checkpoint.folder.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(checkpoint.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder)
