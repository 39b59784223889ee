"""The outside peers of benchmarks/gpu.py without a GPU."""

from __future__ import annotations

import itertools
import json
import re
import time
from importlib.util import find_spec

import pytest

from benchmarks.gpu_stages import peer as peer_stage
from benchmarks.gpu_stages.plan import dry_scale, gpu_scale
from benchmarks.gpu_stages.table import markdown

TINY_MIXTRAL = {
    "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "vocab_size": 300,
    "max_position_embeddings": 128,
}  # fmt: skip
ASKED = {"dry": True, "max_new_tokens": 4, "box_s": 60.0, "prompts": [[5, 6, 7], [8], [9, 3], [4, 4, 4, 4]]}


def test_the_outside_peer_generates_and_stops_in_time(tmp_path):
    """transformers on this CPU in the place of a GPU: everything but the offload itself."""
    import torch

    from benchmarks.gpu_stages import transformers_peer as peer

    model = peer.random_model(TINY_MIXTRAL)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    batch = peer.left_padded([[5, 6, 7], [8]], "cpu")
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    for box_s, steps in ((60.0, 4), (0.0, 1)):
        path = tmp_path / "answer.json"
        watch = peer.Watch({"system": "test"}, path, box_s)
        begun_s = time.perf_counter()
        model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
                       stopping_criteria=[watch])  # fmt: skip
        answer = json.loads(path.read_text())
        assert (answer["steps"], answer["generated_tokens"]) == (steps, 2 * steps)
        assert answer["generation_s"] <= time.perf_counter() - begun_s


@pytest.mark.parametrize("holds", [1, 2, 3, 4])
def test_the_outside_peer_takes_as_many_sequences_as_fit(tmp_path, capsys, holds):
    import torch

    from benchmarks.gpu_stages import transformers_peer as peer

    model, path, tried = peer.random_model(TINY_MIXTRAL), tmp_path / "answer.json", []
    original = model.generate

    def generate(input_ids, **options):
        tried.append(len(input_ids))
        if len(input_ids) > holds:
            raise torch.OutOfMemoryError("device memory")
        return original(input_ids=input_ids, **options)

    model.generate = generate
    peer.generate(model, ASKED, {"system": "test"}, path)
    answer = json.loads(path.read_text())
    assert tried == {4: [4], 3: [4, 2], 2: [4, 2], 1: [4, 2, 1]}[holds]
    assert (answer["batch"], answer["generated_tokens"], answer["steps"]) == (tried[-1], 4 * tried[-1], 4)
    model.generate = lambda **options: (_ for _ in ()).throw(torch.OutOfMemoryError("device memory"))
    with pytest.raises(MemoryError, match="not even one sequence"):
        peer.generate(model, ASKED, {}, path)


def test_the_outside_peer_needs_host_memory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_stage, "free_host_gb", lambda: 40.0)
    found = peer_stage.measure(gpu_scale(host_gb=137.4), tmp_path, 60.0, batch=2)
    for name, row in found["peers"].items():
        assert row["answer"] is None
        needs = "is not installed: pip install" if find_spec(name) is None else "needs 97 GB .* of which 40 are free"
        assert re.search(needs, row["reason"])


@pytest.mark.needs("accelerate", extra="dev")
def test_accelerate_offloads_this_model_and_says_the_same():
    """Its hooks bring each module's weights for each call; here from the host's memory to the host's."""
    import accelerate
    import torch

    from benchmarks.gpu_stages import accelerate_peer as peer
    from benchmarks.gpu_stages.transformers_peer import left_padded

    model, batch = peer.random_model(TINY_MIXTRAL), left_padded(ASKED["prompts"], "cpu")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **options)
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    devices = peer.placed(model, model.model.embed_tokens.weight.nbytes + 1.5 * layer_bytes)
    assert [devices[f"model.layers.{layer}"] for layer in range(4)] == [0, "cpu", "cpu", "cpu"]
    moved = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in moved.parameters())
    assert torch.equal(moved.generate(**batch, **options), expected)


@pytest.mark.slow
def test_peers_that_are_not_installed_are_left_out_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(peer_stage, "find_spec", lambda name: None)
    found = peer_stage.measure(dry_scale("moelens"), tmp_path, 600.0, batch=2)
    assert found["peers"]["accelerate"]["answer"]["system"] == "transformers, without offload (dry)"
    needs = "deepspeed is not installed: pip install deepspeed"
    assert found["peers"]["deepspeed"] == {"answer": None, "reason": needs}
    assert f"deepspeed: nothing measured {needs}\n" in capfd.readouterr().out
    page = markdown({"title": "t", "facts": {}, "stages": {"peer": {"status": "ok", **found}}})
    assert f"| deepspeed | - | - | - | {needs} |" in page


def test_all_parameters_lie_side_by_side_in_one_area():
    """CUDA pins the area as a whole: with each parameter pinned by itself, runs on a GPU ended with an error."""
    import torch

    from benchmarks.gpu_stages import accelerate_peer as peer

    areas = []
    model = peer.random_model(
        TINY_MIXTRAL, lambda nbytes: areas.append(torch.zeros(nbytes, dtype=torch.uint8)) or areas[-1]
    )
    (area,) = areas
    places = sorted((p.data_ptr() - area.data_ptr(), p.nbytes) for p in model.parameters())
    assert all(start + nbytes <= following for (start, nbytes), (following, _) in itertools.pairwise(places))
    assert places[0][0] == 0 and sum(places[-1]) <= area.nbytes
    assert all(start % 4096 == 0 for start, _ in places)
    assert all(torch.isfinite(p).all() and p.abs().max() > 0 for p in model.parameters())


def test_deepspeed_is_told_to_bring_the_next_layer_from_pinned_memory():
    """Its configuration counts parameters; those of a layer are the model's."""
    from benchmarks.gpu_stages import deepspeed_peer as peer
    from benchmarks.gpu_stages.transformers_peer import random_model

    model = random_model(TINY_MIXTRAL)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    found = peer.settings(TINY_MIXTRAL, 5)
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]) == (3, {"device": "cpu", "pin_memory": True})
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_max_live_parameters"]) == (layer, 2 * layer)
    assert zero["stage3_param_persistence_threshold"] == TINY_MIXTRAL["hidden_size"], "norms, and nothing larger, stay"
    assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] == 5


@pytest.mark.parametrize(("device_gb", "batch"), [(16.0, 60), (1.0, 1), (1000.0, 200)])
def test_the_first_batch_is_what_the_device_is_likely_to_hold(device_gb, batch):
    from benchmarks.gpu_stages.transformers_peer import likely_batch

    mixtral = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
    asked = {"config": mixtral, "prompts": [[1] * 450] * 200, "max_new_tokens": 16, "device_gb": device_gb}
    assert likely_batch(asked, weights_bytes=7e9 if device_gb > 8 else 2e9) == batch
