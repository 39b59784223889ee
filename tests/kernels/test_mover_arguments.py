"""The mover refuses bad arguments in Python, with the argument's name."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import DataMover, Staging
from kernels import _mover_arguments as check
from kernels._extension import native

BAD_MOVERS = {
    "device": {"device": "tpu:0"},
    "packet_bytes": {"packet_bytes": 0},
    "depth": {"depth": 0},
    "rate_bytes_s": {"rate_bytes_s": -1.0},
    "num_threads": {"num_threads": 3},
    "cores": {"cores": [0, 0]},
    "staging.num_slots": {"staging": Staging(num_slots=0)},
    "staging.num_threads": {"staging": Staging(num_threads=0)},
}
MORE_BAD_MOVERS = [
    ("device", {"device": "meta"}),
    ("packet_bytes", {"packet_bytes": 1.5}),
    ("packet_bytes", {"packet_bytes": (1 << 40) + 1}),
    ("packet_bytes", {"packet_bytes": 1 << 62, "staging": Staging(num_slots=4)}),
    ("packet_bytes", {"packet_bytes": 1 << 64}),
    ("depth", {"depth": 1 << 32}),
    ("staging.num_slots", {"packet_bytes": 1 << 40, "staging": Staging(num_slots=2)}),
    ("staging.num_slots", {"packet_bytes": 1, "staging": Staging(num_slots=1 << 31)}),
    ("staging.num_threads", {"staging": Staging(num_threads=1 << 31)}),
    ("rate_bytes_s", {"rate_bytes_s": float("inf")}),
    ("rate_bytes_s", {"rate_bytes_s": 1e9, "device": "cuda:0"}),
    ("num_threads", {"num_threads": 2, "device": "cuda:0"}),
    ("num_threads", {"num_threads": 0}),
    ("catch_up_s", {"catch_up_s": -1e-3}),
    ("cores", {"cores": [100_000]}),
    ("cores", {"cores": [0], "staging": Staging()}),
]


@pytest.mark.parametrize(("field", "arguments"), [*BAD_MOVERS.items(), *MORE_BAD_MOVERS])
def test_a_mover_names_the_bad_argument(field, arguments):
    with pytest.raises((ValueError, TypeError), match=f"^{field}:"):
        DataMover(**arguments)


def test_a_packet_may_be_larger_than_any_request():
    with DataMover(packet_bytes=1 << 40) as mover:
        src = torch.ones(5)
        mover.submit([dst := torch.zeros(5)], [src]).wait(60)
        assert torch.equal(dst, src)


@pytest.mark.parametrize(("packet_bytes", "num_slots"), [(2**63 - 1, 1), (2**62, 2), (2**60, 2**20)])
def test_staging_memory_beyond_64_bits_is_refused(packet_bytes, num_slots):
    with pytest.raises(ValueError, match=r"^(packet_bytes|staging\.num_slots): .*too large"):
        native().Mover(packet_bytes, 2, 0.0, 0.0, 1, num_slots, 1, [], -1, "")


def test_the_largest_packets_number_one():
    mover, entry = native().Mover(2**63 - 1, 2, 0.0, 0.0, 1, 0, 0, [], -1, ""), types.SimpleNamespace(ticket=None)
    src, dst = torch.ones(5), torch.zeros(5)
    mover.submit(entry, [dst.data_ptr()], [src.data_ptr()], [src.nbytes], False, 0, 0)
    assert entry.ticket.wait(60.0, False) and mover.close(10.0)
    assert entry.ticket.state() == "done" and torch.equal(dst, src)


GOOD = torch.ones(4, 6)
BAD_TENSORS = {
    "list": (GOOD, "srcs"),
    "type": ([GOOD.numpy()], r"srcs\[0\]"),
    "device": ([GOOD.to("meta")], r"srcs\[0\]"),
    "strides": ([GOOD.t()], r"srcs\[0\]"),
    "expanded": ([torch.ones(1).expand(4, 6)], r"srcs\[0\]"),
    "shape": ([GOOD.view(6, 4)], r"dsts\[0\]"),
    "size": ([torch.ones(4, 7)], r"dsts\[0\]"),
    "dtype": ([GOOD.int()], r"dsts\[0\]"),
    "number": ([GOOD, GOOD], "dsts"),
    "sparse": ([GOOD.to_sparse()], r"srcs\[0\]"),
    "conj": ([torch.ones(4, 6, dtype=torch.complex64).conj()], r"srcs\[0\]"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_submit_names_the_bad_tensor(name):
    srcs, field = BAD_TENSORS[name]
    with DataMover() as mover:
        with pytest.raises((ValueError, TypeError), match=f"^{field}:"):
            mover.submit([torch.zeros(4, 6)], srcs)
        assert mover.counters()["normal"].num_requests == 0


@pytest.mark.parametrize("index", [0, 1])
def test_submit_names_the_bad_destination(index):
    dsts = [torch.zeros(4, 6), torch.zeros(4, 6)]
    dsts[index] = torch.zeros(6, 4).t()
    with DataMover() as mover, pytest.raises(ValueError, match=rf"^dsts\[{index}\]: expected a contiguous"):
        mover.submit(dsts, [GOOD, GOOD])


@pytest.mark.parametrize("field", ["wait_event", "record_event"])
@pytest.mark.parametrize("value", [1, -1, None, True])
def test_events_need_cuda_and_integers(field, value):
    with DataMover() as mover, pytest.raises((ValueError, TypeError), match=f"^{field}:"):
        mover.submit([torch.zeros(4, 6)], [GOOD], **{field: value})


def test_submit_refuses_overlaps():
    arena = torch.zeros(100)
    other = torch.ones(10)
    with DataMover() as mover:
        with pytest.raises(ValueError, match=r"^dsts\[0\]: overlaps srcs\[0\] in memory"):
            mover.submit([arena[:10]], [arena[9:19]])
        with pytest.raises(ValueError, match=r"^dsts\[[02]\]: overlaps dsts\[[02]\] in memory"):
            mover.submit([arena[:10], arena[40:50], arena[5:15]], [other] * 3)
        with pytest.raises(ValueError, match=r"^dsts\[1\]: overlaps srcs\[0\] in memory"):
            mover.submit([arena[50:60], arena[:10]], [arena[5:15], other])
        mover.submit([arena[:10], arena[10:20]], [arena[20:30], arena[25:35]]).wait(60)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 12)), max_size=6)


@settings(max_examples=500, derandomize=True)
@given(SPANS)
def test_overlaps_are_found_exactly(spans):
    """Against every pair of intervals."""
    dsts, srcs, sizes = ([span[i] for span in spans] for i in range(3))

    def meet(a: int, a_size: int, b: int, b_size: int) -> bool:
        return bool(set(range(a, a + a_size)) & set(range(b, b + b_size)))

    pairs = {(i, False, j) for i, d in enumerate(dsts) for j, s in enumerate(srcs) if meet(d, sizes[i], s, sizes[j])}
    for i, d in enumerate(dsts):
        pairs |= {(i, True, j) for j, e in enumerate(dsts) if i != j and meet(d, sizes[i], e, sizes[j])}
    if not pairs:
        check.disjoint(dsts, srcs, sizes)
        return
    with pytest.raises(ValueError) as caught:
        check.disjoint(dsts, srcs, sizes)
    texts = {f"dsts[{i}]: overlaps {'dsts' if d else 'srcs'}[{j}] in memory" for i, d, j in pairs}
    assert str(caught.value) in texts
