"""Every profile states its numbers with kind and source, and they fit together as hardware does."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from harness.config import ConfigError, parse
from harness.hardware.constants import Constant
from harness.hardware.profile import HardwareConfig
from harness.hardware.ratios import REFERENCES, ratios
from harness.machine.base import GPU, Work
from harness.record.measured import Measured
from tests.composing import composed, names_in
from tests.unit.record.recorded import span

NAMES = names_in("hardware")
REAL = [name for name in NAMES if name not in ("laptop", "local")]  # these play machines, or measure this one
NAMED_IN_THE_ISSUES = (
    "t4 t4x2 t4x4 l4 l40 a40 a5000 a5000x8 a6000 v100-32g a100-40g-pcie a100-80g a100-80gx2 h200 rtx4090"
)
PAPERS = {  # what the papers state: GPUs, device GB, host GB, cores
    "t4": (1, 16, 192, 24),  # MoE-Lightning Table 2, S1
    "t4x2": (2, 16, 416, 32),  # S6, S8: 32 GB on both
    "t4x4": (4, 16, 416, 32),  # S7, S9: 64 GB on all
    "l4": (1, 24, 192, 24),  # S2
    "a40": (1, 48, 750, 40),  # MoE-Lens §7
    "a5000": (1, 24, 512, 28),  # MoE-Gen Table 3, C2
    "a5000x8": (8, 24, 512, 28),  # Table 5
    "a6000": (1, 48, 480, 16),  # C3
    "v100-32g": (1, 32, None, 26),  # PreScope §6.1
    "a100-40g-pcie": (1, 32, None, 26),
    "a100-80gx2": (2, 80, 200, None),  # MoE-Lightning §6.3
}


@cache
def values_of(name: str, *overrides: str) -> dict[str, Any]:
    return composed(f"hardware={name}", *overrides)["hardware"]


@cache
def profile(name: str, *overrides: str) -> HardwareConfig:
    return parse(HardwareConfig, values_of(name, *overrides), "hardware")


def pairs(hardware: HardwareConfig) -> list[tuple[str, float, float]]:
    """(field, achieved, peak) of every rate that has both."""
    constants = hardware.constants()
    found = []
    for name, peak in constants.items():
        achieved = name.replace("_peak_", "_", 1)
        if achieved != name and achieved in constants:
            found.append((achieved, constants[achieved], peak))
    return found


def test_every_machine_of_the_papers_is_here():
    assert set(REAL) == set(NAMED_IN_THE_ISSUES.split())


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_kind_and_source(name):
    hardware = profile(name)
    constants = hardware.constants()
    assert constants and all(constant.source for constant in constants.values())
    if name not in REAL:
        assert {constant.kind for constant in constants.values()} == {"chosen"}
        return
    assert all(constant.kind in ("peak", "achieved", "nominal") for constant in constants.values())
    assert all(("_peak_" in field) == (constant.kind == "peak") for field, constant in constants.items())


@pytest.mark.parametrize("name", REAL)
def test_a_planner_finds_all_it_needs(name):
    hardware = profile(name)
    may_lack = {"gpu_gflop_s", "ram_times", "ram_plus_gb"}  # these state memory in place of ram_gb
    may_lack |= {"cpu_latent_gflop_s"}  # follows from cpu_gemm_gflop_s
    may_lack |= {"pin_gb_s", "pin_threads"}  # follows from pin_thread_gb_s; has a default
    may_lack |= {"cpu_attention_gb_s"}  # of other kernels
    may_lack |= {"cpu_op_us"} if hardware.cpu_op_us is None else set()  # nothing
    may_lack |= {"p2p_gb_s", "p2p_peak_gb_s"} if hardware.num_gpus == 1 else set()
    assert {f.name for f in fields(hardware) if getattr(hardware, f.name) in (None, {})} == may_lack
    for peak in (False, True):
        assert hardware.gemm_flop_s("bfloat16", peak=peak) > hardware.gemm_flop_s("float32", peak=peak) > 1e12


@pytest.mark.parametrize("name", REAL)
def test_nothing_exceeds_its_peak(name):
    hardware = profile(name)
    found = pairs(hardware)
    both = {field for field, _, _ in found}
    assert both >= {"h2d_gb_s", "d2h_gb_s", "device_gb_s", "host_gb_s", "cpu_gflop_s", "gemm_tflop_s.float32"}
    for field, achieved, peak in found:
        least = 0.05 if field == "cpu_gflop_s" else 0.3  # attention waits for memory, whatever the cores could do
        assert least * peak <= achieved <= peak, f"{field}: {achieved} of {peak}"
    assert hardware.cpu_gb_s <= hardware.host_gb_s and hardware.cpu_gflop_s <= hardware.cpu_gemm_gflop_s
    assert hardware.cpu_gemm_gflop_s <= hardware.cpu_peak_gflop_s


@pytest.mark.parametrize("name", REAL)
def test_ratios_are_those_of_gpu_servers(name):
    """Device memory is far faster than host memory, that faster than the link; the GPU far faster than the CPU."""
    hardware = profile(name)
    assert 3 <= hardware.device_gb_s / hardware.host_gb_s <= 50
    assert 1.5 <= hardware.host_gb_s / hardware.h2d_gb_s <= 12
    assert 5 <= hardware.gemm_flop_s("bfloat16") / hardware.cpu_gemm_gflop_s / 1e9 <= 500  # torch without bfloat16
    assert 1e3 <= hardware.gemm_flop_s("bfloat16") / hardware.h2d_gb_s / 1e9 <= 2e4
    assert hardware.pin_thread_gb_s <= hardware.staging_gb_s <= hardware.host_gb_s / 2
    assert hardware.staged_by(1).staging_gb_s == hardware.pin_thread_gb_s
    assert 2 <= hardware.transfer_latency_us <= 100 and 1 <= hardware.kernel_launch_us <= 20
    assert hardware.ram_gb > hardware.device_memory_gb


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_machines_are_as_the_papers_state_them(name):
    hardware, (num_gpus, device_gb, ram_gb, cores) = profile(name), PAPERS[name]
    assert hardware.num_gpus == num_gpus and hardware.device_memory_gb == device_gb
    assert ram_gb is None or hardware.ram_gb == hardware.pinned_memory_gb == hardware.host_memory_gb == ram_gb
    assert cores is None or hardware.cpu_cores == cores


def test_published_rates():
    a40, l40, a100 = profile("a40"), profile("l40"), profile("a100-80g")
    peaks = [machine.gemm_flop_s("bfloat16", peak=True) / 1e12 for machine in (a40, l40, a100)]
    assert peaks == [150, 181, 312]  # MoE-Lens Table 2
    assert (a40.h2d_gb_s, a40.host_gb_s) == (19.5, 150)  # MoE-Lens §8.1, §7
    for name in ("v100-32g", "a100-40g-pcie"):  # PreScope §2.3
        assert profile(name).h2d_gb_s == pytest.approx(0.79 * profile(name).h2d_peak_gb_s, rel=0.005)


def test_references_are_the_profiles_numbers():
    a40, t4 = profile("a40"), profile("t4")
    expected = {
        "A40": (a40.gemm_flop_s("bfloat16", peak=True) / (a40.h2d_gb_s * 1e9), a40.host_gb_s / a40.h2d_gb_s),
        # the paper's cost model has 100 GB/s for the host, and nothing measured
        "T4": (t4.gemm_flop_s("float16", peak=True) / (t4.h2d_gb_s * 1e9), t4.host_peak_gb_s / t4.h2d_gb_s),
    }
    assert set(REFERENCES) == set(expected)
    for name, (flop, host_bytes) in expected.items():
        assert REFERENCES[name]["gpu_flop_per_link_byte"] == pytest.approx(flop)
        assert REFERENCES[name]["host_bytes_per_link_byte"] == pytest.approx(host_bytes)


def test_more_gpus_change_nothing_else_of_the_card():
    for one, many in (("t4", "t4x4"), ("a5000", "a5000x8"), ("a100-80g", "a100-80gx2")):
        single, several = profile(one).constants(), profile(many).constants()
        of_the_host = {"ram_gb", "pinned_memory_gb", "host_memory_gb", "p2p_gb_s", "p2p_peak_gb_s"}
        differing = {key for key in several if several[key] != single.get(key)}
        assert {key for key in differing if not key.startswith("cpu_")} <= of_the_host


def test_a_card_without_bfloat16_runs_such_models_in_float16():
    t4 = profile("t4")
    assert t4.gemm_flop_s("bfloat16") == t4.gemm_flop_s("float16") == 24e12
    with pytest.raises(ConfigError, match=r"^hardware\.gemm_tflop_s: profile 't4' states no rate for float8$"):
        t4.gemm_flop_s("float8")


def test_a_number_on_the_command_line_takes_the_place_of_a_sourced_one():
    changed = profile("a40", "hardware.device_memory_gb=16", "hardware.ram_gb=350", "hardware.h2d_gb_s=25")
    assert (changed.device_memory_gb, changed.h2d_gb_s) == (16, 25)
    assert changed.pinned_memory_gb == changed.host_memory_gb == 350
    assert changed.constants()["h2d_gb_s"].kind == "chosen"
    sizes_gb = {"device": 16, "pinned": 350, "host": 350, "ram": 350}
    assert changed.capacities_bytes == {tier: size * 10**9 for tier, size in sizes_gb.items()}
    assert changed.link_ceilings_gb_s == {"h2d": 25, "d2h": 19.5, "pin": 4 * 8.8}


def test_constants_are_numbers_that_survive_copies():
    constant = Constant(19.5, "achieved", "somewhere")
    for copied in (copy.deepcopy(constant), copy.copy(constant)):
        assert (copied, copied.kind, copied.source) == (19.5, "achieved", "somewhere")
    assert json.dumps({"rate": constant}) == '{"rate": 19.5}' and f"{constant:g}" == "19.5"
    hardware = profile("a40")
    assert replace(hardware, num_gpus=2).h2d_gb_s.source == hardware.h2d_gb_s.source


SOURCED: dict[str, Any] = {"value": 1.0, "kind": "achieved", "source": "s"}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("h2d_gb_s", "fast", r"h2d_gb_s: must be a valid number, or value, kind and source, got 'fast'"),
        ("h2d_gb_s", True, r"h2d_gb_s: must be a valid number"),
        ("h2d_gb_s", 0, r"h2d_gb_s: must be > 0, got 0"),
        ("h2d_gb_s", 1e-300, r"h2d_gb_s: must lie in 1e-06 to 1e\+09, got 1e-300"),
        ("cpu_gemm_gflop_s", 1e300, r"cpu_gemm_gflop_s: must lie in 1e-06 to 1e\+09, got 1e\+300"),
        ("device_memory_gb", None, r"device_memory_gb: must be a valid number"),
        ("h2d_gb_s", {"value": 1.0, "kind": "achieved"}, r"h2d_gb_s\.source: missing"),
        ("h2d_gb_s", SOURCED | {"value": -1}, r"h2d_gb_s\.value: must be > 0, got -1"),
        ("h2d_gb_s", SOURCED | {"kind": "measured"}, r"h2d_gb_s\.kind: must be one of peak, achieved"),
        ("h2d_gb_s", SOURCED | {"source": ""}, r"h2d_gb_s\.source: must say where"),
        ("h2d_gb_s", SOURCED | {"unit": "GB"}, r"h2d_gb_s\.unit: unknown key"),
        ("h2d_gb_s", SOURCED | {"kind": "peak"}, r"h2d_gb_s\.kind: must be achieved or chosen, got peak"),
        ("h2d_peak_gb_s", SOURCED, r"h2d_peak_gb_s\.kind: must be peak or chosen, got achieved"),
        ("ram_gb", SOURCED, r"ram_gb\.kind: must be nominal or chosen, got achieved"),
        ("ram_gb", 100, r"pinned_memory_gb: must be at most ram_gb 100\.0, got 750"),
        ("gemm_tflop_s", {"bf16": 1.0}, r"gemm_tflop_s\.bf16: unknown dtype; valid ones are float32"),
        ("gemm_tflop_s", {"bfloat16": -1.0}, r"gemm_tflop_s\.bfloat16: must be > 0, got -1\.0"),
        ("gemm_tflop_s", {"bfloat16": {"value": 1.0}}, r"gemm_tflop_s\.bfloat16\.kind: missing"),
        ("gemm_tflop_s", 1.0, r"gemm_tflop_s: must be a mapping from dtype to constant"),
        ("num_gpus", 0, r"num_gpus: must be >= 1, got 0"),
    ],
)
def test_mistakes_name_the_field(field, value, told):
    with pytest.raises(ConfigError, match=rf"^hardware\.{told}"):
        parse(HardwareConfig, values_of("a40") | {field: value}, "hardware")


def test_a_runs_ratios_are_told_by_the_byte_over_the_link():
    """6 TFLOP in two busy seconds of the gpu and 2 GB/s: 1500 FLOP a byte; of host memory's 73 GB/s 36.5 bytes."""
    hardware = parse(HardwareConfig, composed("hardware=t4", "hardware.h2d_gb_s=2")["hardware"], "hardware")
    spans = [span(GPU, 0, 1.5, work=Work(flops=5e12)), span(GPU, 3, 3.5, work=Work(flops=1e12)), span(GPU, 4, 9)]
    measured = Measured.of(spans, (0, 9))
    work = measured.gpu_flops, measured.gpu_s
    found = ratios(hardware, *work, 2.0)
    assert found["gpu_gflop_s_achieved"] == pytest.approx(3000)
    assert found["gpu_flop_per_link_byte"] == pytest.approx(1500)
    assert found["host_bytes_per_link_byte"] == pytest.approx(36.5)
    chosen = replace(hardware, host_gb_s=None)
    assert ratios(chosen, *work, 2.0)["host_bytes_per_link_byte"] == pytest.approx(hardware.cpu_gb_s / 2)
    assert ratios(chosen, *work, 3.0)["host_bytes_per_link_byte"] is None, "the link is not the profile's"
    assert ratios(hardware, *work, None) is None and ratios(hardware, 0.0, 0.0, 2.0) is None
