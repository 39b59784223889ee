import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.config import ConfigError
from harness.model.checkpoint import Checkpoint, part_views
from harness.model.checkpoint_files import INDEX_FILE, WeightFiles

W1 = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def split_in_two(folder):
    """As save_pretrained shards a larger model."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-0000{shard}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def message(folder, dtype=None) -> str:
    with pytest.raises(ConfigError) as raised:
        Checkpoint(folder, dtype)
    assert raised.value.field in ("model.path", "model.dtype") and "\n" not in str(raised.value)
    return raised.value.message


def read(checkpoint, layer, name):
    part = next(part for i, part in checkpoint.parts() if (i, part.name) == (layer, name))
    region = torch.full((part.nbytes,), 255, dtype=torch.uint8)
    checkpoint.read_part(layer, part, region)
    return part_views(part, region)


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_hold_the_stacked_tensors(tiny, tiny_copy, sharded):
    truth = load_file(tiny.folder / "model.safetensors")
    if sharded:
        split_in_two(tiny_copy)
    checkpoint = Checkpoint(tiny_copy)
    expert = read(checkpoint, 1, "expert.2")
    assert torch.equal(expert["gate_up"], torch.cat([truth[W1], truth[W1.replace("w1", "w3")]]))
    assert torch.equal(expert["down"], truth[W1.replace("w1", "w2")])
    attention = read(checkpoint, 0, "attention_in")
    assert torch.equal(attention["qkv"], torch.cat([truth[Q.replace("q_proj", f"{p}_proj")] for p in "qkv"]))
    head = read(checkpoint, None, "head")
    assert torch.equal(head["lm_head"], truth["lm_head.weight"])
    assert torch.equal(head["final_norm"], truth["model.norm.weight"])
    assert torch.equal(read(checkpoint, None, "embedding")["embed"], truth["model.embed_tokens.weight"])


def test_dtype_is_converted_and_defaults_to_the_checkpoints_own(tiny, tiny_copy):
    assert tiny.spec.dtype == "float32"
    half = Checkpoint(tiny.folder, "bfloat16")
    assert half.spec.dtype == "bfloat16" and half.spec.model_bytes * 2 == tiny.spec.model_bytes
    assert torch.equal(read(half, 1, "expert.2")["down"], read(tiny, 1, "expert.2")["down"].bfloat16())
    edit_json(tiny_copy / "config.json", lambda c: c.update(dtype="bfloat16"))
    assert Checkpoint(tiny_copy).spec.dtype == "bfloat16"
    edit_json(tiny_copy / "config.json", lambda c: c.pop("dtype"))
    assert Checkpoint(tiny_copy).spec.dtype == "float32"
    assert Checkpoint(tiny_copy).stored_dtypes() == {"float32"}


def test_float64_checkpoints_need_a_choice(tiny_copy):
    edit_json(tiny_copy / "config.json", lambda c: c.update(dtype="float64"))
    assert message(tiny_copy) == "the checkpoint is stored as float64: choose float32, bfloat16 or float16"
    assert Checkpoint(tiny_copy, "float32").spec.dtype == "float32"


def test_float16_is_read_as_stored(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    edit_json(tiny_copy / "config.json", lambda c: c.update(dtype="float16"))
    checkpoint = Checkpoint(tiny_copy)
    assert checkpoint.spec.dtype == "float16" and checkpoint.stored_dtypes() == {"float16"}
    assert torch.equal(read(checkpoint, 1, "expert.2")["down"], checkpoint.tensors()[W1.replace("w1", "w2")])


def test_weights_are_views_of_the_mapped_file(tiny):
    files = WeightFiles(tiny.folder)
    assert files.tensor(Q).data_ptr() == files.tensor(Q).data_ptr()


def test_tied_embeddings_need_no_lm_head(tiny_copy):
    edit_json(tiny_copy / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert "lm_head.weight: differs from model.embed_tokens.weight" in message(tiny_copy)
    edit_json(tiny_copy / "config.json", lambda c: c.update(tie_word_embeddings=False))
    rewrite(tiny_copy, lambda t: t.pop("lm_head.weight"))
    assert "lm_head.weight: tensor missing" in message(tiny_copy)
    edit_json(tiny_copy / "config.json", lambda c: c.update(tie_word_embeddings=True))
    checkpoint = Checkpoint(tiny_copy)
    assert torch.equal(read(checkpoint, None, "head")["lm_head"], read(checkpoint, None, "embedding")["embed"])


def test_truncated_and_garbled_files_are_named(tiny_copy):
    whole = (tiny_copy / "model.safetensors").read_bytes()
    for damaged in (whole[:-100], whole[:50], b"", b"\xff" * 4096, whole + b"rest"):
        (tiny_copy / "model.safetensors").write_bytes(damaged)
        assert "model.safetensors: corrupt or truncated safetensors file" in message(tiny_copy)


def test_a_truncated_shard_is_the_one_named(tiny_copy):
    split_in_two(tiny_copy)
    shard = tiny_copy / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard}: corrupt or truncated" in message(tiny_copy)
    shard.unlink()
    assert f"{shard}: missing, though {INDEX_FILE} places tensors in it" in message(tiny_copy)


def test_damaged_indexes_are_named(tiny_copy):
    weight_map = split_in_two(tiny_copy)
    index = tiny_copy / INDEX_FILE
    edit_json(index, lambda c: c["weight_map"].pop(W1))
    assert message(tiny_copy).startswith(f"{W1}: tensor missing")
    other = next(file for file in weight_map.values() if file != weight_map[W1])
    edit_json(index, lambda c: c["weight_map"].update({W1: other}))
    assert f"{W1}: tensor missing from {tiny_copy / other}, where {INDEX_FILE} places it" in message(tiny_copy)
    edit_json(index, lambda c: c["weight_map"].update({W1: "../elsewhere.safetensors"}))
    assert "places tensors outside its folder" in message(tiny_copy)
    index.write_text('{"weight_map": []}')
    assert "needs a `weight_map`" in message(tiny_copy)
    index.write_text("{")
    assert "not readable as JSON" in message(tiny_copy)


def test_mis_shaped_tensors_are_named(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({W1: t[W1].T.contiguous()}))
    assert message(tiny_copy).startswith(f"{W1}: shape must be a share of (192, 64)")
    rewrite(tiny_copy, lambda t: t.update({W1: t[W1].T.contiguous()[:-1]}))
    assert f"{W1}, {W1.replace('w1', 'w3')}: must have 192 rows together by config.json, got [95, 96]" in message(
        tiny_copy
    )
    router = "model.layers.0.block_sparse_moe.gate.weight"
    rewrite(tiny_copy, lambda t: t.update({W1: torch.zeros(96, 64), router: t[router][:7].clone()}))
    assert message(tiny_copy) == f"{router}: shape must be (8, 64) by config.json, got (7, 64)"


def test_a_scalar_in_place_of_a_matrix_is_named(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({Q: torch.tensor(1.0)}))
    assert message(tiny_copy).startswith(f"{Q}: shape must be")


def test_quantised_tensors_are_named(tiny_copy):
    rewrite(tiny_copy, lambda t: t.update({Q: t[Q].to(torch.int8)}))
    assert message(tiny_copy) == f"{Q}: dtype must be one of F64, F32, F16, BF16, got I8"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_tensors_with_nan_or_infinity_are_named_when_read(tiny_copy, poison, dtype):
    def change(tensors):
        tensors[W1][3, 5] = poison

    rewrite(tiny_copy, change)
    with pytest.raises(ConfigError, match=f"model.path: {W1}: corrupt: holds NaN or infinity"):
        read(Checkpoint(tiny_copy, dtype), 1, "expert.2")


def test_folders_without_safetensors_say_why(tiny_copy, tmp_path):
    assert "no-such-folder: no such folder" in message(tmp_path / "no-such-folder")
    (tiny_copy / "model.safetensors").rename(tiny_copy / "pytorch_model.bin")
    assert "holds pickle weights only (pytorch_model.bin); only safetensors are read" in message(tiny_copy)
    (tiny_copy / "pytorch_model.bin").unlink()
    assert f"has neither model.safetensors nor {INDEX_FILE}" in message(tiny_copy)


def test_damaged_config_is_named(tiny_copy):
    path = tiny_copy / "config.json"
    edit_json(path, lambda c: c.pop("num_local_experts"))
    assert message(tiny_copy) == "config.json: num_local_experts: missing; a positive integer is needed"
    edit_json(path, lambda c: c.pop("model_type"))
    assert message(tiny_copy) == f"{path}: model_type: missing"
    path.write_text("[1]")
    assert message(tiny_copy) == f"{path}: must hold a JSON object"
    path.write_text("{'a'")
    assert f"{path}: not readable as JSON" in message(tiny_copy)
    path.unlink()
    assert message(tiny_copy) == f"{path}: missing"


def test_tokenizer_round_trips_any_text_and_starts_with_bos(tiny):
    tokenizer = tiny.tokenizer()
    text = "Sort a list, naïve — 你好\n\tdef f(): return 1"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and max(ids) < tiny.spec.vocab_size == len(tokenizer)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == tiny.spec.eos_token_id


def test_damaged_tokenizers_are_named(tiny_copy):
    (tiny_copy / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not readable"):
        Checkpoint(tiny_copy).tokenizer()
    (tiny_copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: missing; a fast tokenizer is needed: save one there"):
        Checkpoint(tiny_copy).tokenizer()
    (tiny_copy / "tiktoken.model").touch()
    with pytest.raises(ConfigError, match=r"missing; a fast tokenizer is needed: make one with .*TikTokenConverter"):
        Checkpoint(tiny_copy).tokenizer()


def test_code_of_the_checkpoint_never_runs(tiny_copy):
    (tiny_copy / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(tiny_copy / "config.json", lambda c: c.update(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    edit_json(tiny_copy / "tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}))
    checkpoint = Checkpoint(tiny_copy)
    assert checkpoint.tokenizer()("a")["input_ids"] and read(checkpoint, 0, "attention_in")


def test_fingerprint_follows_content_not_place(tiny, tiny_copy, tmp_path):
    original = tiny.fingerprint()
    assert Checkpoint(tiny_copy).fingerprint() == original and len(original) == 16
    elsewhere = shutil.copytree(tiny_copy, tmp_path / "weights")

    def negate_one_expert(tensors):  # same headers, same sizes
        tensors[W1].neg_()

    rewrite(elsewhere, negate_one_expert)
    assert Checkpoint(elsewhere).fingerprint() != original

    def change_the_last_row(tensors):  # behind the sampled values
        tensors[Q][-1].neg_()

    version = Checkpoint(tiny_copy).version()
    assert Checkpoint(tiny_copy).version() == version
    rewrite(tiny_copy, change_the_last_row)
    assert Checkpoint(tiny_copy).version() != version
    edit_json(
        tiny_copy / "config.json", lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    assert Checkpoint(tiny_copy).fingerprint() != original
