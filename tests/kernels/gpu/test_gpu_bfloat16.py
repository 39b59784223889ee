"""The kernels in bfloat16 against float32, by the cases of the GPU benchmark: small, or on a GPU of Mixtral's size."""

import pytest
import torch

from benchmarks.gpu_stages import kernels
from benchmarks.gpu_stages.kernel_cases import MIXTRAL_8X7B, TINY, cases
from kernels import triton as gpu

LATER = ["prefill", *["decode"] * 4, "copies", "rows", "rows"]
NAMES = ["routing", "routing", *["experts"] * 5, *LATER]


def test_small_cases_are_right_and_their_rivals_agree(device):
    found = list(cases(TINY, device))
    assert [case.kernel for case in found] == ["routing", "routing", "experts", *LATER]
    for case in found:
        assert case.error() <= case.tolerance, case.name
        expected = case.expected()
        rival_error = (case.rival().float() - expected).abs().max() / expected.abs().max()
        assert case.kernel == "copies" or rival_error <= case.tolerance, case.name  # a copy's rival copies others
        assert case.nbytes > 0


@pytest.mark.slow
def test_what_is_wrong_is_named_and_left_out(device, monkeypatch):
    """One kernel gives other numbers, one NaN, one fails; each is looked at, and the others do their work."""
    kept = []

    def planted(name, change):
        plain = getattr(gpu, name)

        def run(*args, **options):
            plain(*args, **options)
            change(args)

        monkeypatch.setattr(gpu, name, run)

    def refuses(*args, **options):
        raise RuntimeError("no such instruction\nand more")

    planted("grouped_experts", lambda args: args[3][0].mul_(1.5))
    planted("causal_attention", lambda args: args[4][0, 0].fill_(float("nan")))
    monkeypatch.setattr(gpu, "paged_decode_attention", refuses)
    found = kernels.measure(kept.append, device=device.type, sizes=TINY, seconds=lambda run: 1e-3)
    assert found["left_out"] == ["experts", "prefill", "decode"]
    by_status = {name: row["status"] for name, row in found["runs"].items()}
    assert list(by_status.values()) == ["ok", "ok", "wrong", "wrong", *["failed", "ok"] * 2, "ok", "ok", "ok"]
    assert "RuntimeError: no such instruction" in [row.get("error") for row in found["runs"].values()]
    assert kernels.overrides(found["runs"]) == ["machine.triton=[routing,copies,rows]"]
    assert kernels.overrides({}) == []
    again = kernels.measure(kept.append, kept[4]["runs"], device=device.type, sizes=TINY, seconds=lambda run: 1e-3)
    assert list(again["runs"].values())[2]["error"] == "the process ended while this was under way"


@pytest.mark.parametrize(
    ("name", "change", "kernel"),
    [
        ("append_rows", lambda new, slots, cache: (new, slots ^ 1, cache), "rows"),  # to a slot beside its own
        ("append_rows", lambda new, slots, cache: (new[1:], slots[1:], cache), "rows"),
        ("foresee_experts", lambda logits, *counts: (logits.roll(1, dims=1), *counts), "routing"),
        ("foresee_experts", lambda logits, count, top_k: (logits, count, top_k - 1), "routing"),
    ],
)
@pytest.mark.slow
def test_rows_in_wrong_places_and_wrong_forecasts_are_found(device, monkeypatch, name, change, kernel):
    plain = getattr(gpu, name)
    monkeypatch.setattr(gpu, name, lambda *args, **options: plain(*change(*args), **options))
    found = kernels.measure(lambda rows: None, device=device.type, sizes=TINY, seconds=lambda run: 1e-3)
    assert found["left_out"] == [kernel]


@pytest.mark.cuda
@pytest.mark.parametrize("number", range(len(NAMES)), ids=lambda n: f"{NAMES[n]} {n}")
def test_on_a_gpu_at_the_size_of_mixtral_8x7b(number):
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    case = next(case for at, case in enumerate(cases(MIXTRAL_8X7B, torch.device("cuda"))) if at == number)
    assert case.kernel == NAMES[number]
    assert case.error() <= case.tolerance
