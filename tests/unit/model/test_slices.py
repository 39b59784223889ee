"""Parts of fused checkpoint tensors, and tensors of several dtypes in one part."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.model.checkpoint import part_views
from harness.model.layout import ALIGNMENT_BYTES, Section, TensorSlice, TensorSource, lay_out

shares = st.builds(Section, st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.booleans())
slices = st.builds(TensorSlice, st.lists(st.integers(0, 5) | shares, max_size=2).map(tuple), st.booleans())


@given(piece=slices, shape=st.tuples(*[st.integers(1, 8)] * 4))
def test_the_shape_is_told_without_the_tensor(piece, shape):
    told = piece.shape_of(shape)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    if told is not None:
        found = piece.of(tensor)
        assert tuple(found.shape) == told
        assert not found.numel() or found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_experts_that_lie_in_one_tensor_are_found():
    """Rows by expert as DBRX has them, transposed; columns of gate and up in turns as gpt-oss has them."""
    experts = torch.randn(4, 6, 10)
    stacked = experts.reshape(24, 10)
    assert torch.equal(TensorSlice((Section(2, 3, 4),), transposed=True).of(stacked), experts[2].T)
    up = TensorSlice((3, Section(0, 1, 1), Section(1, 2, 2, interleaved=True)), transposed=True)
    assert torch.equal(up.of(experts), experts[3, :, 1::2].T) and up.shape_of((4, 6, 10)) == (5, 6)


@pytest.mark.parametrize("piece", [TensorSlice((4,)), TensorSlice((Section(0, 1, 3),)), TensorSlice((0, 0, 0, 0))])
def test_what_a_tensor_does_not_have_is_noticed(piece):
    assert piece.shape_of((4, 6, 10)) is None


def test_tensors_of_a_part_have_their_own_dtypes():
    sources = [
        TensorSource("a", (3,), ("a",)),
        TensorSource("bias", (5,), ("bias",), dtype="float32"),
        TensorSource("b", (2, 2), ("b",)),
    ]
    part = lay_out("part", "bfloat16", sources)
    assert [t.nbytes for t in part.tensors] == [6, 20, 8]
    assert all(t.offset_bytes % ALIGNMENT_BYTES == 0 for t in part.tensors)
    views = part_views(part, torch.zeros(part.nbytes, dtype=torch.uint8))
    assert [view.dtype for view in views.values()] == [torch.bfloat16, torch.float32, torch.bfloat16]
