"""Parameters and bytes of the models in conf/model against transformers' own models and published sizes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from harness.config import ConfigError, parse
from harness.model.components import COMPONENT_NAMES
from harness.model.config import ModelConfig
from harness.model.spec import ModelSpec
from tests.unit.model.published import PUBLISHED

CONF = Path(__file__).resolve().parents[3] / "conf" / "model"
NAMES = sorted(PUBLISHED)
# Which tensor belongs to which part, by what its name contains; the first that fits counts.
TENSORS = (
    ("embedding", ("embed_tokens", "wte")),
    ("head", ("lm_head",)),
    ("shared_experts", ("shared_expert",)),
    ("expert", (".experts.",)),
    ("router", (".gate.", ".router.")),
    ("dense_mlp", (".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")),
    ("attention", (".self_attn.", ".attn.")),
    ("norms", ("input_layernorm", "post_attention_layernorm", ".norm_1.", ".norm_2.")),
    ("final_norm", ("model.norm.", "norm_f.")),
)


def spec_of(name: str) -> ModelSpec:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    spec = parse(ModelConfig, values, "model").planned_spec()
    assert spec is not None
    return spec


def real_sizes(name: str) -> Counter[str]:
    """Parameters by part of transformers' model, built without memory. Every model at its full size."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED[name].config))
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
    sizes: Counter[str] = Counter()
    for tensor_name, tensor in tensors:
        fitting = [part for part, texts in TENSORS if any(text in tensor_name for text in texts)]
        assert fitting, f"{tensor_name} belongs to no part"
        sizes[fitting[0]] += tensor.numel()
    return sizes


def test_every_model_with_dimensions_is_covered():
    yamls = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")}
    assert {name for name, values in yamls.items() if values["spec"]} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_transformers_part_by_part(name):
    spec, real = spec_of(name), real_sizes(name)
    assert {name: each.total_params for name, each in spec.components.items()} == {n: real[n] for n in COMPONENT_NAMES}
    assert spec.num_params == sum(real.values())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_ones(name):
    spec, published = spec_of(name), PUBLISHED[name]
    assert spec.num_params / 1e9 == pytest.approx(published.billions, abs=0.051)
    active = spec.active_params + (spec.components["embedding"].params if published.counts_embedding else 0)
    assert active / 1e9 == pytest.approx(published.active_billions, rel=0.025)


@pytest.mark.parametrize("name", NAMES)
def test_one_token_passes_the_chosen_experts_and_all_else_but_the_embedding(name):
    spec, real = spec_of(name), real_sizes(name)
    chosen = real["expert"] * spec.experts_per_token // spec.num_experts
    assert spec.active_params == sum(real.values()) - real["embedding"] - real["expert"] + chosen


@pytest.mark.parametrize(
    ("name", "mib"),
    [("mixtral-8x7b", 336), ("qwen3-30b-a3b", 9), ("deepseek-v2-lite", 16.5), ("moonlight-16b-a3b", 16.5)],
)
def test_expert_sizes_are_those_of_prescope_table_2(name, mib):
    assert spec_of(name).components["expert"].nbytes == mib * 2**20


@pytest.mark.parametrize(("name", "gigabytes"), [("mixtral-8x7b", 94), ("mixtral-8x22b", 282), ("dbrx", 264)])
def test_model_sizes_are_those_of_moelens_section_7(name, gigabytes):
    assert spec_of(name).model_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_published_formats_give_the_published_file_sizes():
    gpt_oss = spec_of("gpt-oss-120b")
    assert gpt_oss.model_bytes / 2**30 == pytest.approx(60.8, abs=0.05)  # its model card
    r1 = spec_of("deepseek-r1")
    h, embedding = r1.hidden_dim, 2 * r1.vocab_size * r1.hidden_dim
    # The files hold one more layer for multi-token prediction: a MoE layer, a 2h x h projection, embedding and head.
    prediction_bytes = r1.layer_bytes + 2 * (2 * h * h + 3 * h) + 2 * embedding
    assert r1.model_bytes + prediction_bytes == pytest.approx(688_586_727_753, rel=2e-4)  # size of its safetensors


def test_a_format_narrows_only_the_matrices_it_names():
    fp8 = spec_of("deepseek-v3")
    plain = replace(fp8, weights=None)
    assert plain.model_bytes == 2 * plain.num_params
    for part in COMPONENT_NAMES:
        narrow, wide = fp8.components[part], plain.components[part]
        assert narrow.vector_bytes == wide.vector_bytes == 2 * wide.vector_params
        width = 1 + 4 / 128**2 if part in ("attention", "expert", "shared_experts", "dense_mlp") else 2
        assert narrow.matrix_bytes == width * wide.matrix_params
    assert replace(plain, dtype="float32").model_bytes == 4 * plain.num_params
    unknown = replace(fp8.weights, components=("experts",))
    with pytest.raises(ConfigError, match=r"weights\.components: must be among .*, got experts"):
        _ = replace(fp8, weights=unknown).components


def test_r1_is_v3():
    assert replace(spec_of("deepseek-r1"), name="deepseek-v3") == spec_of("deepseek-v3")


def test_kv_cache_sizes():
    assert spec_of("mixtral-8x7b").kv_bytes_per_token == 2**17  # MoE-Lens Table 2: an eighth of a MiB
    for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "moonlight-16b-a3b"):
        assert spec_of(name).kv_bytes_per_token_layer == 2 * (512 + 64)  # DeepSeek-V2, §2.1.4: d_c + d_h^R numbers
    assert spec_of("gpt-oss-120b").kv_bytes_per_token_layer == 2 * 2 * 8 * 64


def test_windows_hold_for_the_layers_that_slide():
    spec = spec_of("gpt-oss-120b")
    assert [spec.seen_tokens(layer, 1000) for layer in range(4)] == [128, 1000, 128, 1000]
    assert spec.seen_tokens(0, 50) == 50
    assert replace(spec, sliding_layers="all").seen_tokens(1, 1000) == 128
    assert spec_of("mixtral-8x7b").seen_tokens(0, 1000) == 1000
    with torch.device("meta"):
        config = AutoConfig.for_model(**PUBLISHED["gpt-oss-120b"].config)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    assert slides == [spec.seen_tokens(layer, 1000) == 128 for layer in range(spec.num_layers)]


def test_dimensions_alone_do_not_run():
    values = yaml.safe_load((CONF / "deepseek-v2.yaml").read_text())
    dimensions = parse(ModelConfig, values, "model")
    expected = (
        r"^model\.path: missing: 'deepseek-v2' has dimensions only, for planning; to run it, name its checkpoint$"
    )
    with pytest.raises(ConfigError, match=expected):
        dimensions.require_weights()
    parse(ModelConfig, values | {"path": "somewhere"}, "model").require_weights()
    assert parse(ModelConfig, values | {"dtype": "float32"}, "model").planned_spec().dtype == "float32"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_layers": 0}, "num_layers: must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: must divide num_heads 128"),
        ({"experts_per_token": 161}, "experts_per_token: must lie between 1 and num_experts 160, got 161"),
        (
            {"dense_layers": [60]},
            "dense_layers: must ascend, below num_layers 60, and leave a layer with experts",
        ),
        ({"dense_layers": [1, 0]}, "dense_layers: must ascend, below num_layers 60"),
        ({"dense_dim": 0}, "dense_dim: must be at least 1 where dense_layers has any, else 0; got 0"),
        ({"head_dim": 128}, r"head_dim: must be nope_dim \+ rope_dim = 192, got 128"),
        ({"sliding_window": 0}, "sliding_window: must be at least 1 or null, got 0"),
        ({"qk_norm": "heads"}, "qk_norm: "),
        ({"hidden": 64}, "hidden: "),
        ({"latent": {"kv_rank": 0, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}}, "latent.kv_rank: must be at"),
        ({"weights": {"name": "x", "bytes_per_param": 0.0, "components": []}}, "weights.bytes_per_param: must be > 0"),
    ],
)
def test_impossible_dimensions_name_the_field(change, told):
    values = yaml.safe_load((CONF / "deepseek-v2.yaml").read_text())
    values["spec"] |= change
    with pytest.raises(ConfigError, match=rf"^model\.spec\.{told}"):
        parse(ModelConfig, values, "model")
