"""MoE-Lens Table 2 and section 5's numbers, as printed: typed in here from the paper, apart from the figure's code."""

from __future__ import annotations

import pytest

from paper_figures.moelens.table2 import PROFILES, rows, tokens_decimal
from paper_figures.support import hardware_profile, model_spec

PRINTED = """
A40 19.2k 614 1228
L40 23.2k 741 1482
A100 40.0k 1277 2554
"""
DECIMAL = {"A40": (18_750, 629, 1258), "L40": (22_625, 759, 1518), "A100": (39_000, 1309, 2617)}  # x 131,072 bytes


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[str, str, str]]:
    return {row.what: (row.published, row.paper_units, row.decimal) for row in rows()}


@pytest.mark.parametrize("line", PRINTED.split("\n")[1:-1])
def test_table_2_as_printed_and_in_decimal_units(table, line):
    gpu, *printed = line.split()
    mine = [values for what, values in table.items() if what.startswith(f"{gpu}:")]
    assert [published for published, _, _ in mine] == printed
    assert [ours for _, ours, _ in mine] == printed
    assert [int(decimal.replace(",", "")) for _, _, decimal in mine] == list(DECIMAL[gpu])


def test_numbers_of_the_text(table):
    assert table["5.1: tokens to saturate an A40"] == ("19,200", "19,200", "18,750")
    assert table["5.1: KV cache of 512-token sequences (TB)"] == ("1.2", "1.2", "1.26")
    assert table["the same with the measured 19.5 GB/s"][2] == "30,769"
    assert float(table["5.3: B_mem with 200 GB of KV cache (GB/s)"][2]) == pytest.approx(60, rel=0.05)
    assert float(table["5.3: B_mem over the link's rate"][2]) == pytest.approx(3, rel=0.05)
    assert 100 <= float(table["5.3: CPU attention for that (GFLOP/s)"][2]) < 1000


def test_the_profiles_have_the_rates_that_the_table_prints():
    spec = model_spec("mixtral-8x7b")
    rates = {gpu: hardware_profile(name).gemm_flop_s("bfloat16", peak=True) / 1e12 for gpu, name in PROFILES.items()}
    assert rates == {"A40": 150, "L40": 181, "A100": 312}
    assert tokens_decimal(150, spec) == 18_750
    assert spec.kv_bytes_per_token == 2**17, "0.125 MB of 2^20 bytes"
