"""Every function of the family against the Hugging Face module it stands for, layer by layer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.model import zoo
from harness.model.checkpoint import Checkpoint, part_views

PROMPT = torch.from_numpy(np.random.default_rng(7).integers(0, 384, 70))


def hf_model(folder, dtype):
    kwargs = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs).eval()


class Recorder:
    """Inputs and outputs of every submodule of one forward pass, by module name."""

    def __init__(self, model):
        self.inputs, self.outputs = {}, {}
        self.hooks = [m.register_forward_hook(self._hook(n), with_kwargs=True) for n, m in model.named_modules()]
        with torch.inference_mode():
            self.logits = model(PROMPT[None]).logits[0]
        for hook in self.hooks:
            hook.remove()

    def _hook(self, name):
        def hook(module, args, kwargs, output):
            self.inputs[name] = args[0] if args else kwargs.get("hidden_states")
            self.outputs[name] = output

        return hook


def weights_of(checkpoint):
    views = {}
    for layer, part in checkpoint.parts():
        region = torch.empty(part.nbytes, dtype=torch.uint8)
        checkpoint.read_part(layer, part, region)
        views[layer, part.name] = part_views(part, region)
    return views


def behind(family, spec, weights, layer, attn, hidden):
    w = weights[layer, "attention_out"]
    return family.after_attention(spec, w, family.output_projection(spec, w, attn, layer), hidden, layer)


def combine(checkpoint, weights, layer, normed, ids, expert_weights):
    out = torch.zeros_like(normed)
    for expert in range(checkpoint.spec.num_experts):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        y = checkpoint.family.expert(checkpoint.spec, weights[layer, f"expert.{expert}"], normed[tokens])
        out.index_add_(0, tokens, (y * expert_weights[tokens, slot, None]).to(out.dtype))
    return out


VARIANTS = {
    "plain": {},
    "sliding-window": {"sliding_window": 24},
    "tied": {"tie_embeddings": True},
    "one-kv-head": {"num_kv_heads": 1, "head_dim": 32},
    "every-expert": {"num_experts": 4, "experts_per_token": 4, "rope_theta": 1e4},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_float32_layer_by_layer(variant, model_config):
    checkpoint = Checkpoint(zoo.ensure(model_config("mixtral-tiny", **VARIANTS[variant])))
    spec, family, weights = checkpoint.spec, checkpoint.family, weights_of(checkpoint)
    seen = Recorder(hf_model(checkpoint.folder, torch.float32))
    close = {"rtol": 1e-4, "atol": 2e-5}

    hidden = family.embed(spec, weights[None, "embedding"], PROMPT)
    torch.testing.assert_close(hidden, seen.outputs["model.embed_tokens"][0], rtol=0, atol=0)
    for layer in range(spec.num_layers):
        name = f"model.layers.{layer}"
        hidden = seen.inputs[name][0]  # the reference's own input, so that errors do not add up over layers
        q, k, v = family.attention_in(spec, weights[layer, "attention_in"], hidden, torch.arange(len(PROMPT)), layer)
        assert q.is_contiguous() and k.is_contiguous()
        reference_v = seen.outputs[f"{name}.self_attn.v_proj"][0].view(v.shape)
        torch.testing.assert_close(v, reference_v, **close)
        attn = family.prefill_attention(spec, {}, q, k, v, [len(PROMPT)], layer)
        torch.testing.assert_close(attn, seen.inputs[f"{name}.self_attn.o_proj"][0], **close)
        residual, normed, ids, expert_weights, _ = behind(family, spec, weights, layer, attn, hidden)
        torch.testing.assert_close(residual, seen.inputs[f"{name}.post_attention_layernorm"][0], **close)
        torch.testing.assert_close(normed, seen.outputs[f"{name}.post_attention_layernorm"][0], **close)
        _, reference_weights, reference_ids = seen.outputs[f"{name}.mlp.gate"]
        assert torch.equal(ids, reference_ids) and ids.dtype == torch.int64
        torch.testing.assert_close(expert_weights, reference_weights, **close)
        out = residual + combine(checkpoint, weights, layer, normed, ids, expert_weights)
        torch.testing.assert_close(out, seen.outputs[name][0], **close)
    logits = family.head(spec, weights[None, "head"], seen.inputs["model.norm"][0])
    torch.testing.assert_close(logits, seen.logits, **close)


@pytest.mark.parametrize("method", ["native", "cast"])
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_hugging_face_is(method, tiny, monkeypatch):
    """Each block's error against the float32 reference, beside the error of Hugging Face in bfloat16."""
    monkeypatch.setattr("harness.model.linear.bf16_method", lambda: method)
    checkpoint = Checkpoint(tiny.folder, "bfloat16")
    spec, family, weights = checkpoint.spec, checkpoint.family, weights_of(checkpoint)
    model = hf_model(tiny.folder, torch.bfloat16)
    seen = Recorder(model)
    exact = hf_model(tiny.folder, torch.bfloat16).float()  # the same rounded weights

    def rms_error(got, truth):
        return (got.double() - truth.double()).pow(2).mean().sqrt().item()

    for layer in range(spec.num_layers):
        name, module = f"model.layers.{layer}", exact.model.layers[layer]
        hidden = seen.inputs[name][0]
        q, k, v = family.attention_in(spec, weights[layer, "attention_in"], hidden, torch.arange(len(PROMPT)), layer)
        attn = family.prefill_attention(spec, {}, q, k, v, [len(PROMPT)], layer)
        residual, normed, ids, expert_weights, _ = behind(family, spec, weights, layer, attn, hidden)
        embeddings = exact.model.rotary_emb(hidden.float()[None], torch.arange(len(PROMPT))[None])
        mask = torch.full((len(PROMPT), len(PROMPT)), float("-inf")).triu(1)[None, None]
        normed_in = module.input_layernorm(hidden.float()[None])
        true_residual = hidden.float() + module.self_attn(normed_in, embeddings, mask)[0][0]
        theirs = seen.inputs[f"{name}.post_attention_layernorm"][0]
        assert rms_error(residual, true_residual) < 1.2 * rms_error(theirs, true_residual) + 1e-4

        moe_in = seen.inputs[f"{name}.mlp"][0]  # compare experts on one input and one routing
        _, their_weights, their_ids = seen.outputs[f"{name}.mlp.gate"]
        ours = combine(checkpoint, weights, layer, moe_in, their_ids, their_weights)
        true_out = module.mlp.experts(moe_in.float(), their_ids, their_weights)
        assert rms_error(ours, true_out) < 1.2 * rms_error(seen.outputs[f"{name}.mlp"][0], true_out) + 1e-4
        probs = module.mlp.gate(normed.float())[0].softmax(dim=-1)
        boundary = probs.topk(spec.experts_per_token).values[:, -1]
        assert (boundary - probs.gather(-1, ids).amin(dim=-1) < 0.02).all()
        chosen = probs.gather(-1, ids)
        torch.testing.assert_close(expert_weights, chosen / chosen.sum(-1, keepdim=True), rtol=0, atol=0.02)


def test_decode_positions_beyond_the_prompt_are_rotated_as_in_one_pass(tiny):
    """q and k of a token do not depend on which other tokens are in the batch."""
    spec, family, weights = tiny.spec, tiny.family, weights_of(tiny)
    hidden = family.embed(spec, weights[None, "embedding"], PROMPT)
    w = weights[0, "attention_in"]
    whole = family.attention_in(spec, w, hidden, torch.arange(len(PROMPT)), 0)
    alone = family.attention_in(spec, w, hidden[41:42], torch.tensor([41]), 0)
    for one, all_of_them in zip(alone, whole, strict=True):
        torch.testing.assert_close(one[0], all_of_them[41], rtol=1e-5, atol=1e-5)


def test_everything_stays_on_the_device_it_got(tiny):
    """The meta device refuses to mix with the CPU, as a GPU does."""
    spec, family = tiny.spec, tiny.family
    weights = {name: {key: view.to("meta") for key, view in views.items()} for name, views in weights_of(tiny).items()}
    token_ids = torch.zeros(12, dtype=torch.int64, device="meta")
    hidden = family.embed(spec, weights[None, "embedding"], token_ids)
    q, k, v = family.attention_in(spec, weights[0, "attention_in"], hidden, token_ids, 0)
    assert (q.shape, k.shape, v.shape) == ((12, 4, 16), (12, 2, 16), (12, 2, 16))
    windowed = replace(spec, sliding_window=3)
    attn = family.prefill_attention(windowed, {}, q, k, v, [5, 7], 0)
    assert family.decode_attention(windowed, {}, q[0], k.transpose(0, 1), v.transpose(0, 1), 9, 0).shape == (64,)
    residual, normed, ids, expert_weights, _ = behind(family, spec, weights, 0, attn, hidden)
    assert ids.shape == expert_weights.shape == (12, 2)
    y = family.expert(spec, weights[0, "expert.5"], normed[:3])
    logits = family.head(spec, weights[None, "head"], residual[:2])
    assert y.shape == (3, 64) and logits.shape == (2, 384)
    assert all(x.device.type == "meta" for x in (attn, residual, normed, ids, expert_weights, y, logits))
