"""The validation's arithmetic and its settings; the runs themselves are the emulated machine's and the simulator's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.hardware.slowed import Looks
from harness.settings import load_strategy, parse_settings
from harness.validate import __main__ as validate
from harness.validate.__main__ import Report, settings_of
from harness.validate.recorded import record_routing
from harness.validate.report import aggregates, bound, by_kind, compared, figures, markdown, verdict
from tests.composing import composed, names_in

SUMMARY = {
    "num_passes": 12,
    "window_s": 5.0,
    "throughput_tok_s": 40.0,
    "preemptions": 1,
    "utilization": {"gpu": 0.5, "cpu": 0.01, "h2d": 0.9},
    "where_time_goes": [{"lane": "gpu", "kind": "experts", "busy_s": 2.5, "num_ops": 100, "moved_bytes": 7.0}],
}
LINK_BYTES = {"lane": "h2d", "kind": "weights", "busy_s": 4.5, "num_ops": 10, "moved_bytes": 4e9}
RATES = {"h2d": 1e9, "d2h": 1e9}
QUIET = {"taken_share": 0.0, "slowed_share": 0.0}


def test_there_are_enough_settings_and_all_are_valid():
    settings = settings_of()
    assert len(settings) >= 40
    assert len({setting.name for setting in settings}) == len(settings)
    assert {setting.strategy for setting in settings} == set(names_in("strategy"))
    for machine in (validate.EMULATED, validate.SIMULATED):
        for setting in settings:
            values = composed(*machine, *setting.given(Path("trace.jsonl.gz")))
            load_strategy(parse_settings(values).strategy)


def test_figures_cover_the_steady_passes():
    assert figures(SUMMARY)["pass_s"] == pytest.approx(0.5)
    assert figures(SUMMARY)["gpu_busy_s"] == pytest.approx(0.25)
    assert figures({**SUMMARY, "num_passes": 2})["pass_s"] == pytest.approx(2.5)


def row(*, emulated: tuple[float, ...], simulated: float, strategy: str = "s", **imagined) -> dict:
    runs = [figures({**SUMMARY, "throughput_tok_s": rate}) | QUIET for rate in emulated]
    found = figures({**SUMMARY, "throughput_tok_s": simulated, **imagined})
    return compared(f"k={simulated}", runs, found, strategy=strategy, link_bytes_s=RATES)


def test_the_median_run_counts_and_the_spread_is_told():
    found = row(emulated=(30.0, 40.0, 90.0), simulated=50.0)
    assert found["errors"]["throughput_tok_s"] == pytest.approx(0.25)
    assert found["spreads"]["throughput_tok_s"] == pytest.approx(1.5)
    assert found["errors"]["gpu_busy_s"] == 0.0
    assert "cpu_busy_s" not in found["errors"], "a lane that does nothing to speak of is not compared"


def test_the_report_has_sizes_of_errors_and_the_worst_first():
    rows = [row(emulated=(40.0,), simulated=rate) for rate in (38.0, 44.0, 40.0)]
    found = aggregates(rows)["throughput_tok_s"]
    assert (found["mean"], found["median"], found["worst"]) == pytest.approx((0.05, 0.05, 0.10))
    assert found["bias"] == pytest.approx(0.05 / 3)
    text = markdown(rows, "Made today.")
    assert text.index("k=44.0") < text.index("k=38.0") < text.index("k=40.0")
    assert "no medians" in text and "Made today." in text
    assert "Medians of 3" in markdown([row(emulated=(40.0, 41.0, 42.0), simulated=40.0)], "")


@pytest.mark.parametrize(
    ("rates", "busy", "met"),
    [
        ((40.0, 40.8, 41.2), 0.9, True),
        ((41.6, 41.6, 41.6), 0.9, False),
        ((40.0,) * 30 + (44.8,), 0.9, False),
        ((40.0,), 0.75, False),
    ],
    ids=["small", "mean too large", "worst too large", "a lane too large"],
)
def test_the_report_says_whether_the_aims_are_met(rates, busy, met):
    """Mean at most 3 %, worst and busy times at most 10 %."""
    utilization = SUMMARY["utilization"] | {"h2d": busy}
    rows = [row(emulated=(40.0,), simulated=rate, utilization=utilization) for rate in rates]
    found, text = verdict(rows)
    assert found == met
    assert text in markdown(rows, "Made today.")
    assert ("MET" if met else "MISSED") in text


def test_strategies_count_alike_however_many_settings_they_have():
    """A strategy of 8 % beside one with four settings of 1 % makes 4.5 %, not 2.4."""
    rows = [row(emulated=(40.0,), simulated=rate, strategy=name) for rate, name in [(40.4, "a")] * 4 + [(43.2, "b")]]
    met, text = verdict(rows)
    assert not met and "over strategies 4.5%" in text
    assert "| a | 4 | 1.0% |" in markdown(rows, "") and "| b | 1 | 8.0% |" in markdown(rows, "")


def test_a_lane_that_does_little_may_be_off():
    """The cpu lane has 1 % of a pass: three times as much is no miss. The gpu's half is."""
    for lane, met in (("cpu", True), ("gpu", False)):
        shares = SUMMARY["utilization"] | {lane: 3 * SUMMARY["utilization"][lane]}
        assert verdict([row(emulated=(40.0,), simulated=40.0, utilization=shares)])[0] == met


def test_how_well_the_emulated_machine_repeats_itself_is_told():
    """The gpu's busy time is 0.25 and 0.3 s in two runs, a share of 0.18 of their median; simulated are 0.27."""

    def run(gpu: float) -> dict:
        return figures({**SUMMARY, "utilization": SUMMARY["utilization"] | {"gpu": gpu}})

    def found(*shares: float) -> dict:
        return compared("k", [run(each) | QUIET for each in shares], run(0.54), strategy="s", link_bytes_s=RATES)

    text = markdown([found(0.5, 0.6)], "")
    assert "Of the 2 busy times that matter 0 are off by more than 10%." in text
    assert "farther apart than that in 0 of these, and in 1 of the others." in text
    assert "| gpu_busy_s | 1.8% | 1.8% | 1.8% | 1.8% | -1.8% | 18.2% | 1 |" in text
    both = markdown([found(0.7, 0.7), found(0.6, 0.8)], "")
    assert "Of the 4 busy times that matter 2 are off by more than 10%." in both
    assert "in 1 of these, and in 0 of the others." in both
    single = markdown([found(0.5)], "")
    assert "themselves" not in single and "| +8.0% | - | 1 |" in single


def test_the_links_alone_stand_beside_the_simulator():
    """4 GB at 1 GB/s in 10 passes of half a second: 0.4 s, a fifth too little."""
    found = row(emulated=(40.0,), simulated=40.0, where_time_goes=[*SUMMARY["where_time_goes"], LINK_BYTES])
    assert found["links_alone"] == pytest.approx(-0.2)
    assert "a pass: 0.0%, where bytes of the busiest link over its rate alone are 20.0% off" in verdict([found])[1]


def test_the_busiest_lane_says_what_binds_a_setting():
    cpu_bound = {**SUMMARY, "utilization": {"gpu": 0.4, "cpu": 0.7, "h2d": 0.2}}
    found = row(emulated=(40.0,), simulated=42.0)
    other = compared("k=0", [figures(cpu_bound) | QUIET], figures(cpu_bound), strategy="s", link_bytes_s=RATES)
    assert bound(found) == ("link", pytest.approx(0.9)) and bound(other) == ("cpu", pytest.approx(0.7))
    text = markdown([found, other], "")
    assert "| link | 1 | 5.0% |" in text and "| cpu | 1 | 0.0% |" in text and "\n| gpu |" not in text
    assert "| k=0 | cpu 70% |" in text


def test_an_ops_error_is_told_though_others_make_up_for_it():
    """Twice as long in one setting and half in the other: right on average, wrong in both."""

    def with_experts(busy_s: float) -> dict:
        spent = [{"lane": "gpu", "kind": "experts", "busy_s": busy_s, "num_ops": 100, "moved_bytes": 7.0}]
        return row(emulated=(40.0,), simulated=40.0, where_time_goes=spent)

    (found,) = by_kind([with_experts(3.75), with_experts(1.25)])
    assert found["simulated_s"] == pytest.approx(found["emulated_s"])
    assert found["errors"] == pytest.approx([-0.5, 0.5]) and (found["far_off"], found["settings"]) == (2, 2)
    assert "| +0% | -50% to +50% | 2 of 2 |" in markdown([with_experts(3.75), with_experts(1.25)], "")


def test_ops_of_one_machine_alone_are_told():
    """An op that the simulator never submits has no error, and would stand in no table."""
    other = [{"lane": "h2d", "kind": "weights", "busy_s": 3.0, "num_ops": 40, "moved_bytes": 7.0}]
    text = markdown([row(emulated=(40.0,), simulated=40.0, where_time_goes=other)], "")
    assert "emulated and simulated: gpu experts 100 and 0; h2d weights 0 and 40." in text
    assert "one machine ran" not in markdown([row(emulated=(40.0,), simulated=40.0)], "")


def test_other_schedules_are_marked():
    same = row(emulated=(40.0,), simulated=40.0)
    other = row(emulated=(40.0,), simulated=41.0, num_passes=13)
    assert "`!`" not in markdown([same], "")
    text = markdown([same, other], "")
    assert "In 1 settings emulated and simulated runs differ" in text
    assert "12, simulated 13 `!`" in text
    assert "`!`" in markdown([row(emulated=(40.0,), simulated=41.0, preemptions=2)], "")


def test_kinds_of_ops_are_compared_over_all_settings():
    slower = [{"lane": "gpu", "kind": "experts", "busy_s": 3.0, "num_ops": 100, "moved_bytes": 7.0}]
    rows = [row(emulated=(40.0,), simulated=40.0), row(emulated=(40.0,), simulated=40.0, where_time_goes=slower)]
    (found,) = by_kind(rows)
    assert found["kind"] == "gpu experts"
    assert (found["busy_s"], found["emulated_s"], found["simulated_s"]) == pytest.approx((5.0, 0.025, 0.0275))
    assert "| gpu experts | 5.0 | 25000 us | 27500 us | +10% |" in markdown(rows, "Made today.")


def test_runs_of_other_code_are_not_mixed(tmp_path):
    where = {"num_cores": 2, "processor": "a processor"}
    header = {"sources": "a", "date": "today", "code": "c0de", "environment": where, "command": "python -m x"}
    report = Report(tmp_path, header, resume=False)
    report.runs["s"] = [{"throughput_tok_s": 1.0}]
    report.write([row(emulated=(40.0,), simulated=41.0)])
    text = (tmp_path / "validation.md").read_text()
    assert "Made on today with code c0de on 2 cores of a processor by `python -m x`." in text
    assert Report(tmp_path, {"sources": "a"}, resume=True).runs == report.runs
    assert Report(tmp_path, {"sources": "b"}, resume=False).runs == {}
    with pytest.raises(ValueError, match="of other code"):
        Report(tmp_path, {"sources": "b"}, resume=True)
    assert validate.main(["--out", str(tmp_path), "--resume"]) == 2


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ([(0.01, 0.1)], (0.01, 0.1)),
        ([(0.2, 0.0), (0.01, 0.0)], (0.01, 0.0)),
        ([(0.0, 0.5), (0.0, 0.9), (0.02, 0.1)], (0.02, 0.1)),
        ([(0.3, 0.0), (0.0, 0.8), (0.1, 0.9)], (0.0, 0.8)),
    ],
    ids=["quiet", "cores taken", "cores slowed", "disturbed three times"],
)
def test_a_disturbed_run_is_made_again_and_the_best_one_kept(monkeypatch, made, kept):
    """At most 3 % of the cores may be taken, and cores slowed for 40 % of the time: twice that is better than ten times
    the other."""
    runs = iter([{"taken_share": taken} for taken, _ in made])
    looks = [look for _, slowed in made for look in (Looks(0, 0), Looks(100, round(100 * slowed)))]
    monkeypatch.setattr(validate, "_emulated_once", lambda setting, trace: next(runs))
    found = validate.emulated(None, None, SimpleNamespace(read=iter(looks).__next__))
    assert (found["taken_share"], found["slowed_share"]) == kept
    assert next(runs, None) is None, "as many as were needed"


def test_the_report_says_for_how_long_cores_were_slowed():
    rows = [row(emulated=(40.0,), simulated=40.0) | {"slowed_share": share} for share in (0.1, 0.2, 0.6)]
    text = markdown(rows, "", {"a.json": 0.05, "b.json": 0.4})
    assert "for 20% of a run's time (median; 60% at most), for 5%, 40% of the calibrations'." in text


def test_what_costs_depend_on_is_calibrated(tmp_path):
    hardware = ("hardware.h2d_gb_s=0.7", "hardware.device_memory_gb=0.5", "hardware.d2h_gb_s=0.2", "kv_cache_gb=0.1")
    setting = validate.Setting("ondemand", ("model=qwen3-mini", *hardware))
    assert setting.calibrated == ("model=qwen3-mini", "hardware.device_memory_gb=0.5")
    name = "calibration-qwen3-mini-device_memory_gb-0.5-2.json"
    assert validate.table_of(tmp_path, setting.calibrated, 1) == tmp_path / name


def test_each_model_is_calibrated_and_simulated_by_tables_of_its_own(tmp_path, monkeypatch):
    settings = [validate.Setting("ondemand", own) for own in ((), ("model=qwen3-mini",), ("dataset.max_new_tokens=3",))]
    written, read, in_order = [], [], []
    table = SimpleNamespace(write=written.append)
    monkeypatch.setattr(validate, "measure", lambda settings, log: in_order.append(settings.model.name) or table)

    def ran(setting, trace, cores):
        in_order.append(setting.overrides)
        return {"throughput_tok_s": 1.0, **QUIET}

    monkeypatch.setattr(validate, "emulated", ran)
    merged = SimpleNamespace(read=lambda path: read.append(path) or path, merged=lambda tables: table)
    monkeypatch.setattr(validate, "CalibrationTable", merged)
    traces = {setting.workload: tmp_path for setting in settings}
    cores = SimpleNamespace(read=iter([Looks(n, n // 2) for n in range(0, 80, 10)]).__next__)
    report = Report(tmp_path, {}, resume=False)
    validate.measure_all(settings, report, tmp_path, traces, cores, repeats=2, resume=False)
    own = [tmp_path / f"calibration{model}-{repeat}.json" for repeat in (1, 2) for model in ("", "-qwen3-mini")]
    assert written[:4] == own and read == own[::2] + own[1::2]
    assert report.slowed_shares == {path.name: 0.5 for path in own}
    base, qwen3, more = (setting.overrides for setting in settings)
    assert in_order == 2 * ["mixtral-mini", base, more, "qwen3-mini", qwen3], "a table's runs are right behind it"
    assert "qwen3-mini" not in str(written[4]) and "qwen3-mini" in str(written[5])


def test_a_workload_is_recorded_once_and_found_by_every_setting_with_it(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr(validate, "record_routing", lambda workload, path: recorded.append(workload) or path.touch())
    own = ("model=qwen3-mini", "dataset.num_requests=2")
    settings = [
        validate.Setting(name, (*own, f"strategy.batch_size={n}")) for n, name in enumerate(("fate", "klotski"))
    ]
    settings.append(validate.Setting("fate", ("dataset.num_requests=2",)))
    traces = validate.record_all(settings, tmp_path, keep=True)
    assert recorded == [own, own[1:]] and len(set(traces.values())) == 2
    validate.record_all(settings, tmp_path, keep=True)
    assert len(recorded) == 2, "what is there is kept"
    validate.record_all(settings, tmp_path, keep=False)
    assert len(recorded) == 4


def test_the_simulator_takes_as_many_experts_over_the_link_as_the_emulated_machine(tmp_path, monkeypatch):
    """The recorded routing decides which; with another one it would be other experts."""
    monkeypatch.setattr(validate, "SIMULATED", ("machine=simulated", "hardware=a40", "hardware.device_memory_gb=0.2"))
    workload = ("model=mixtral-tiny", "dataset.num_requests=6", "dataset.max_new_tokens=8", "kv_cache_gb=0.001")
    trace = tmp_path / "trace.jsonl.gz"
    record_routing(workload, trace)
    own = ("strategy.popularity={recorded}", "strategy.cache_slots=5", "strategy.batch_size=3")
    setting = validate.Setting("expert_cache", (*workload, *own))
    run = validate._emulated_once(setting, trace)
    found = validate.in_simulation(setting, [run | QUIET], trace)
    emulated_ops, simulated_ops = (found["kinds"]["h2d weights"][at] for at in (1, 3))
    assert emulated_ops == simulated_ops > 100, found["kinds"]["h2d weights"]
