"""What MoE-Lightning's section 3.3 concludes from its plots, of the series that are drawn here."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paper_figures.moelightning.hrm_plots import attention_intensity, compute, experts_intensity
from paper_figures.support import model_spec

SPEC = model_spec("mixtral-8x7b")


@pytest.fixture(scope="module")
def data():
    return compute()


def test_attention_stays_below_the_first_turning_point(data):
    """ "it may be better to perform attention on CPU", for float16 and for int4."""
    fig4 = data["fig4"]
    for kind in ("achieved", "peak"):
        assert max(fig4["intensities"].values()) < fig4["roofs"][kind]["p1_intensity"]
    assert set(fig4["fastest_on"].values()) == {"cpu"}


def test_attention_intensity_by_hand():
    """Four queries share a key: 16 FLOPs for its 4 bytes (key and value), less what query and result add."""
    assert attention_intensity(SPEC, 512, 16) == pytest.approx(512 * 16384 / (512 * 4096 + 2 * 32 * 128 * 2))
    assert attention_intensity(SPEC, 10**9, 16) == pytest.approx(4)
    assert attention_intensity(SPEC, 10**9, 4) == pytest.approx(16)


def test_expert_intensity_by_hand():
    assert experts_intensity(SPEC, 1) == pytest.approx(1.0), "two experts, each read for one token"
    assert experts_intensity(SPEC, 1000) == pytest.approx(250), "n N_k / N_e, all experts being reached"
    intensities = [experts_intensity(SPEC, n) for n in range(1, 200)]
    assert all(more > less for less, more in pairwise(intensities))


def test_turning_points_lie_on_two_roofs_each(data):
    for kind in ("achieved", "peak"):
        roofs = data["fig5"]["roofs"][kind]
        cpu = min(roofs["cpu_flop_s"], roofs["cpu_bytes_s"] * roofs["p1_intensity"])
        assert roofs["link_bytes_s"] * roofs["p1_intensity"] == pytest.approx(cpu)
        kernel = min(roofs["gpu_flop_s"], roofs["gpu_bytes_s"] * data["fig5"]["intensity_at_micro_batch"])
        assert roofs["kernel_flop_s"] == kernel
        assert roofs["link_bytes_s"] * roofs["p2_intensity"] == pytest.approx(kernel)
        assert roofs["balance_intensity"] == pytest.approx(roofs["p2_intensity"]), "memory limits the GPU at mu = 128"
        assert roofs["p1_intensity"] < roofs["p2_intensity"]
