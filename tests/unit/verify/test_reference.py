"""The Hugging Face model behind verification: what reaches it, what it computes, and what is kept of it."""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from plain_generator import edited, generate
from transformers import AutoConfig, AutoModelForCausalLM

from harness.config import ConfigError
from harness.model import families
from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import INDEX_FILE, SINGLE_FILE
from harness.verify import reference
from harness.verify.oracle import verify


@pytest.fixture
def tiny_copy(checkpoint_of, tmp_path):
    """A folder that a test may damage, before anything has opened it."""
    return shutil.copytree(checkpoint_of("tiny-bfloat16").folder, tmp_path / "copy")


def routed_by_hand(model, routing):
    """transformers' model with its routers replaced by the published equations: softmax, the chosen ones, their sum."""
    for layer, module in enumerate(model.model.layers):

        def forward(hidden, weight=module.mlp.gate.weight, ids=routing[:, layer]):
            exponentials = (hidden @ weight.T).double().exp()
            chosen = exponentials.gather(1, ids)
            return None, (chosen / chosen.sum(1, keepdim=True)).float(), ids

        module.mlp.gate.forward = forward
    return model


@pytest.mark.parametrize("recipe", ["tiny-float32", "tiny-bfloat16"])
@torch.inference_mode()
def test_a_replay_computes_in_float32_with_the_weights_that_the_router_gives_to_the_recorded_experts(
    checkpoint_of, prompts_of, recipe
):
    checkpoint = checkpoint_of(recipe)
    token_ids = prompts_of(checkpoint)[0]
    generator = torch.Generator().manual_seed(3)
    shape = (len(token_ids), checkpoint.spec.num_layers, checkpoint.spec.num_experts)
    routing = torch.rand(shape, generator=generator).topk(2).indices
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32, attn_implementation="eager")
    expected = routed_by_hand(model.eval(), routing)(torch.tensor([token_ids])).logits[0]
    replay = reference.reference_for(checkpoint).replay(token_ids, routing, first_logit=5)
    torch.testing.assert_close(replay.logits, expected[5:], rtol=1e-5, atol=1e-5)
    probs = replay.routers.choice
    assert probs.shape == (shape[1], shape[0], shape[2]) and probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:2]))


def rewrite_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_what_would_choose_another_implementation_never_reaches_transformers(tiny_copy, prompts_of):
    rewrite_config(
        tiny_copy,
        _attn_implementation="evil/kernel",
        attn_implementation="flash_attention_2",
        _experts_implementation="evil/kernel",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        architectures=["EvilForCausalLM"],
        output_router_logits=True,
        router_jitter_noise=float("nan"),
        dtype="bfloat16",
    )
    (tiny_copy / "generation_config.json").write_text("{")
    (tiny_copy / "adapter_config.json").write_text("{")
    (tiny_copy / "evil.py").write_text("raise SystemExit('ran')")
    tensors = tiny_copy / SINGLE_FILE
    weight_map = dict.fromkeys(Checkpoint(tiny_copy).tensors(), "part.safetensors")
    tensors.rename(tiny_copy / "part.safetensors")
    (tiny_copy / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))  # without "metadata"
    checkpoint = Checkpoint(tiny_copy)
    assert verify(checkpoint, generate(checkpoint, prompts_of(checkpoint)[:1]), eos=False).ok
    config = reference.reference_for(checkpoint)._model.config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "eager")


def test_what_is_quantised_is_refused_when_it_is_opened(tiny_copy):
    rewrite_config(tiny_copy, quantization_config={"quant_method": "gptq"})
    with pytest.raises(
        ConfigError, match=r"config\.json: quantization_config\.quant_method: must be fp8 or mxfp4, got 'gptq'"
    ):
        Checkpoint(tiny_copy)
    rewrite_config(tiny_copy, quantization_config=None)
    Checkpoint(tiny_copy)


def test_what_transformers_refuses_is_told_before_a_run(tiny_copy):
    rewrite_config(tiny_copy, rms_norm_eps=1)  # an integer
    with pytest.raises(ConfigError, match=r"config\.json: transformers refuses it \(.*rms_norm_eps.*=off") as told:
        reference.reference_config(Checkpoint(tiny_copy))
    assert "\n" not in str(told.value)


def test_the_reference_has_the_defaults_of_transformers_and_the_entries_of_the_checkpoint(tiny_copy):
    rewrite_config(tiny_copy, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=0.25)
    entries = json.loads((tiny_copy / "config.json").read_text())
    before, checkpoint = deepcopy(entries), Checkpoint(tiny_copy)
    config = reference.reference_config(checkpoint)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (5e5, 0.25)
    for key in ("rope_parameters", "rms_norm_eps", "num_key_value_heads"):
        del entries[key]
    (tiny_copy / "config.json").write_text(json.dumps(entries))
    own = AutoConfig.for_model("mixtral")
    spec, checkpoint = checkpoint.spec, object.__new__(Checkpoint)  # eight KV heads would not fit its tensors
    checkpoint.entries_read, checkpoint.family, checkpoint.spec = entries, families.family("mixtral"), spec
    config = reference.reference_config(checkpoint)
    assert config.rope_parameters == own.rope_parameters and config.rms_norm_eps == own.rms_norm_eps
    assert before["hidden_size"] == config.hidden_size


def test_a_checkpoint_deleted_or_replaced_under_the_run_is_verified_with_what_was_opened(tiny_copy, prompts_of):
    checkpoint = Checkpoint(tiny_copy)
    prompts = prompts_of(checkpoint)[:1]
    (tiny_copy / SINGLE_FILE).unlink()
    sequences = generate(checkpoint, prompts)
    (tiny_copy / SINGLE_FILE).write_bytes(b"something else")
    assert verify(checkpoint, sequences, eos=False).ok
    shutil.rmtree(tiny_copy)
    reference._loaded.clear()
    assert verify(checkpoint, sequences, eos=False).ok


@pytest.mark.parametrize("damage", ["cut short", "rewritten"])
def test_a_checkpoint_changed_under_the_run_is_named(tiny_copy, prompts_of, damage):
    checkpoint = Checkpoint(tiny_copy)
    sequences = generate(checkpoint, prompts_of(checkpoint)[:1])
    path = tiny_copy / SINGLE_FILE
    with path.open("r+b") as file:
        file.truncate(1000) if damage == "cut short" else file.write(path.read_bytes())
    embedding = checkpoint.family.embedding_part(checkpoint.spec)
    region = torch.empty(embedding.nbytes, dtype=torch.uint8)
    for read in (
        lambda: verify(checkpoint, sequences, eos=False),
        lambda: checkpoint.read_part(None, embedding, region),
    ):
        with pytest.raises(ConfigError, match=r"model\.path: .*model\.safetensors: was changed while it was in use"):
            read()


def test_only_the_last_reference_stays_in_memory(checkpoint_of):
    first, second = checkpoint_of("tiny-float32"), checkpoint_of("tiny-bfloat16")
    loaded = reference.reference_for(first)
    assert reference.reference_for(Checkpoint(first.folder)) is loaded
    reference.reference_for(second)
    assert reference.reference_for(first) is not loaded


def test_the_loaded_reference_is_a_copy(checkpoint_of):
    """Of float32 weights, which need no conversion, transformers keeps views of the mapped files."""
    checkpoint = checkpoint_of("tiny-float32")
    mapped = {tensor.untyped_storage().data_ptr() for tensor in checkpoint.tensors().values()}
    parameters = list(reference.reference_for(checkpoint)._model.parameters())
    assert parameters and all(parameter.untyped_storage().data_ptr() not in mapped for parameter in parameters)


def test_float32_weights_run_in_bfloat16_are_checked_with_rounded_weights(checkpoint_of, prompts_of):
    folder = checkpoint_of("tiny-float32").folder
    checkpoint = Checkpoint(folder, "bfloat16")
    report = verify(checkpoint, generate(checkpoint, prompts_of(checkpoint)), eos=False)
    assert report.ok and "bfloat16" in report.mode
    parameter = next(reference.reference_for(checkpoint)._model.parameters())
    assert torch.equal(parameter, parameter.bfloat16().float())


def test_references_are_cached_on_disk_by_prompt_and_served_shortened(checkpoint_of, cache, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32", seed=11)
    oracle = reference.reference_for(checkpoint)
    long = oracle.generate([0, 50, 60], 12)
    monkeypatch.setattr(oracle, "_generate", lambda *args: pytest.fail("generated again"))
    assert oracle.generate([0, 50, 60], 12) == long
    assert oracle.generate([0, 50, 60], 5) == long[:5]
    monkeypatch.undo()
    longer = oracle.generate([0, 50, 60], 15)
    assert longer[:12] == long and len(longer) == 15

    (file,) = (cache / "references" / checkpoint.version()).glob("*/*.json")
    content = json.loads(file.read_text())
    assert content["generated_ids"] == longer
    swapped = [longer[1], longer[0], *longer[2:]]
    for wrong in ("abc", 5, None, [], swapped, longer[:-1], {"a": 1}):
        file.write_text(json.dumps(content | {"generated_ids": wrong}))
        assert oracle.generate([0, 50, 60], 15) == longer and json.loads(file.read_text()) == content
    for damaged in ("damaged", "[]", "[" * 100_000, "{}"):
        file.write_text(damaged)
        assert oracle.generate([0, 50, 60], 15) == longer
    other = oracle.generate([0, 50, 61], 15)
    assert other != longer
    (other_file,) = set(file.parent.iterdir()) - {file}
    other_file.write_bytes(file.read_bytes())  # what is kept for another prompt
    assert oracle.generate([0, 50, 61], 15) == other


def test_a_cache_that_cannot_be_written_costs_no_run(checkpoint_of, tmp_path, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32")
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    (tmp_path / "references").write_text("in the way")
    oracle = reference.Reference(checkpoint)
    assert len(oracle.generate([5, 6, 7], 3)) == 3


def test_generations_that_are_not_finite_are_not_kept(checkpoint_of, tmp_path, cache):
    def overflow(tensors):
        tensors["lm_head.weight"] *= 1e38

    oracle = reference.Reference(edited(checkpoint_of("tiny-float32"), tmp_path / "overflow", overflow))
    for _ in range(2):
        with pytest.raises(reference.NotFiniteError, match="reference logits are not finite"):
            oracle.generate([5, 6, 7], 3)


def test_verification_is_quiet(checkpoint_of, prompts_of, capfd, recwarn):
    checkpoint = checkpoint_of("tiny-float32", seed=12)  # not loaded by any other test
    assert verify(checkpoint, generate(checkpoint, prompts_of(checkpoint)), eos=True).checked == 4
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not recwarn.list


def test_long_contexts_take_the_fused_attention(checkpoint_of, prompts_of, monkeypatch):
    checkpoint = checkpoint_of("tiny-float32", seed=13)
    sequences = generate(checkpoint, prompts_of(checkpoint))
    monkeypatch.setattr(reference, "EAGER_ATTENTION_POSITIONS", 10)
    assert verify(checkpoint, sequences, eos=False).ok
    assert reference.reference_for(checkpoint)._model.config._attn_implementation == "sdpa"
