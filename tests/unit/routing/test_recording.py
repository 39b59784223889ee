"""A run's own routing: the last life of every position, and the same from machines and strategies of all kinds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.engine.sequences import Life, Records
from harness.record.store import read_run
from harness.routing.build import build_routing
from harness.routing.hidden_file import read_hidden
from harness.routing.kinds.trace import read_trace
from harness.routing.recording import FILE_NAME, HIDDEN_FOLDER, last_recorded, recording
from harness.run.experiment import run_experiment
from harness.run.session import Session
from tests.composing import composed
from tests.unit.engine.fakes import SPEC, sequences
from tests.unit.routing.models import steady


def life(value: int, first_generated: int, *lengths: int) -> Life:
    """Passes of so many tokens; `value` marks the life."""
    return Life(first_generated, [np.full((n, SPEC.num_layers, 2), value, dtype=np.int16) for n in lengths])


@steady
@given(prompt=st.integers(1, 5), decoded=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_position_is_what_the_last_life_that_reached_it_computed(prompt, decoded):
    """Each life prefills prompt and generated tokens, then decodes some; the next begins again."""
    (sequence,) = sequences((prompt, 40))
    sequence.records = Records()
    assert last_recorded(sequence, "routing") is None
    generated, expected = 0, {}
    for number, steps in enumerate(decoded):
        prefilled = prompt + generated
        sequence.lives.append(life(number, generated, prefilled, *[1] * steps))
        expected |= dict.fromkeys(range(prefilled + steps), number)
        generated += 1 + steps
    sequence.lives.append(Life(generated))  # a prefill that never ended
    routing = last_recorded(sequence, "routing")
    assert routing is not None
    assert routing.shape == (len(expected), SPEC.num_layers, 2)
    assert routing[:, 0, 0].tolist() == [expected[position] for position in range(len(expected))]


def test_a_shorter_life_leaves_the_rest_to_the_one_before():
    (sequence,) = sequences((2, 9))
    sequence.records = Records()
    sequence.lives = [life(1, 0, 2, 1, 1), life(2, 3, 3)]
    routing = last_recorded(sequence, "routing")
    assert routing is not None and routing[:, 0, 0].tolist() == [2, 2, 2, 1]


def test_rows_are_written_as_sequences_end(tmp_path):
    one, two, rejected = sequences((2, 4), (3, 4), (9, 9))
    rng = np.random.default_rng(0)
    for sequence in (one, two):
        noise = rng.random((5, SPEC.num_layers, 8))
        sequence.lives = [Life(0, [noise.argsort(axis=-1)[..., :2].astype(np.int16)])]
    for sequence in (one, two, rejected):
        sequence.records = Records()
    with recording(tmp_path, SPEC, "a test", routing=True, sample=None) as record:
        record(two)
        assert read_trace(tmp_path / FILE_NAME).request_ids.tolist() == [1]
        record(rejected)
        record(one)
    recorded = read_trace(tmp_path / FILE_NAME)
    assert recorded.request_ids.tolist() == [0, 1]
    assert (recorded.experts == np.concatenate([one.lives[0].routing[0], two.lives[0].routing[0]])).all()
    assert recorded.header.source == "a test"


def test_nothing_is_written_unless_asked(tmp_path):
    with recording(tmp_path, SPEC, "a test", routing=False, sample=None) as record:
        record(sequences((2, 4))[0])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one workload: alone on the machine of threads; preempted, overlapped, in random order."""
    folder = tmp_path_factory.mktemp("runs")
    common = ["experiment=smoke", "wandb.mode=disabled", "progress=false", "verify=off"]
    common += ["record_routing=weights", "record_hidden=true", "record_hidden_mb=0.1"]
    calm = composed(*common, "strategy=ondemand", f"results_dir={folder / 'calm'}")
    tight = ["machine=shuffled", "strategy=moelens", "strategy.n_real=600", "kv_cache_gb=0.0002"]
    return [run_experiment(calm), run_experiment(composed(*common, *tight, f"results_dir={folder / 'tight'}"))]


def test_a_run_records_every_token_that_went_through_the_model(runs):
    summary, folder = runs[0]
    recorded = read_trace(folder / FILE_NAME)
    rows = {row["request_id"]: row for row in read_run(folder).requests}
    assert recorded.request_ids.tolist() == sorted(rows) and len(rows) == summary["num_finished"]
    lengths = np.diff(recorded.starts).tolist()
    prompts = [int(request["prompt_tokens"]) for _, request in sorted(rows.items())]
    generated = [len(request["generated_ids"]) for _, request in sorted(rows.items())]
    assert lengths == [p + g - 1 for p, g in zip(prompts, generated, strict=True)]
    assert recorded.header.source.startswith("emulated run; random weights")
    assert "synthetic:" in recorded.header.source


def test_strategies_machines_and_preemption_record_the_same(runs):
    (_, calm), (summary, tight) = runs
    assert summary["preemptions"] > 0
    one, two = read_trace(calm / FILE_NAME), read_trace(tight / FILE_NAME)
    assert (one.starts == two.starts).all()
    assert (np.sort(one.experts) == np.sort(two.experts)).all()


def test_a_recorded_run_can_be_replayed(runs):
    _, folder = runs[0]
    recorded = read_trace(folder / FILE_NAME)
    header = recorded.header
    model = replace(SPEC, num_layers=header.layers, num_experts=header.experts, experts_per_token=header.k)
    routing = build_routing({"name": "trace", "path": str(folder / FILE_NAME)}, model, 0)
    assert routing.source.startswith("recorded: routing.jsonl.gz (emulated run;")
    length = int(recorded.starts[1])
    found = routing.experts(np.zeros(length, dtype=np.int64), np.arange(length), 1)
    assert (found == recorded.experts[:length, 1]).all()


def test_strategies_machines_and_preemption_record_the_same_hidden_states(runs):
    """Of the same sample of tokens; which experts were chosen by them is what the trace says."""
    calm, tight = (read_hidden(folder / HIDDEN_FOLDER) for _, folder in runs)
    assert 0 < calm.header.num_sampled == len(calm.positions) < calm.header.num_tokens
    assert (calm.request_ids == tight.request_ids).all() and (calm.positions == tight.positions).all()
    assert np.abs(calm.inputs.astype(np.float32) - tight.inputs.astype(np.float32)).max() < 0.01
    for (_, folder), hidden in zip(runs, (calm, tight), strict=True):
        recorded = read_trace(folder / FILE_NAME)
        rows, repeats = recorded.find(hidden.request_ids, hidden.positions)
        assert not repeats.any() and (recorded.experts[rows] == hidden.experts).all()
        assert sum(path.stat().st_size for path in (folder / HIDDEN_FOLDER).iterdir()) < 100_000


def test_weights_are_those_of_the_experts_beside_them(runs):
    (_, calm), (_, tight) = runs
    one, two = read_trace(calm / FILE_NAME), read_trace(tight / FILE_NAME)
    assert one.weights is not None and two.weights is not None
    assert one.weights.sum(axis=-1) == pytest.approx(1, abs=2e-4)
    assert (np.diff(one.weights) <= 0).all(), "the favourite first"
    assert one.weights == pytest.approx(two.weights, abs=1e-3)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("record_hidden=true", "record_hidden: must be false: machine=simulated computes no model; choose a machine"),
        ("record_routing=weights", "record_routing: must be true or false: machine=simulated computes no model"),
        ("record_hidden_mb=0", "record_hidden_mb: must be > 0"),
        ("record_routing=all", "record_routing: must be False, True or 'weights', got 'all'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_loaded(override, told):
    with pytest.raises(ConfigError) as caught:
        Session.of(composed("machine=simulated", "hardware=a40", override))
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)
