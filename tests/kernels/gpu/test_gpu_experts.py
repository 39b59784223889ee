"""Grouped experts over weights anywhere in a buffer, against float64, one (token, choice) pair after another."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels import triton as gpu
from kernels.triton.tiling import Chip, columns_together, expert_tiles, mean_choices

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest sum
quick = settings(max_examples=12)


@dataclass
class Layer:
    """Experts' matrices in one buffer that is NaN elsewhere."""

    buffer: torch.Tensor
    matrices: dict[int, gpu.ExpertMatrices]
    num_experts: int

    @property
    def shape(self):
        return next(iter(self.matrices.values())).shape

    def table(self):
        addresses = {expert: m.addresses for expert, m in self.matrices.items()}
        return gpu.address_table(addresses, self.num_experts, self.buffer.device)


def make_layer(device, dtype, *, hidden, expert_dim, num_experts, present, biases=False, activation="silu", seed=0):
    """Parts at arbitrary aligned offsets, in no order; gate rows stacked over up rows, as checkpoints are read."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [*[expert_dim * hidden] * 3, expert_dim, expert_dim, hidden]
    step = 16 // dtype.itemsize
    gap = 5 * step
    room = sum(-(-size // step) * step + gap for size in sizes)
    buffer = torch.full((num_experts * room + 64,), float("nan"), dtype=dtype, device=device)
    at = (-buffer.data_ptr() % 16) // dtype.itemsize

    def take(*shape):
        nonlocal at
        size = torch.Size(shape).numel()
        view = buffer[at : at + size].view(shape)
        view.copy_((torch.randn(shape, generator=generator) * hidden**-0.5).to(dtype))
        at += -(-size // step) * step + gap
        return view

    matrices = {}
    for expert in reversed(sorted(present)):
        gate, up = (
            take(2 * expert_dim, hidden).chunk(2)
            if (expert_dim * hidden) % step == 0
            else (
                take(expert_dim, hidden),
                take(expert_dim, hidden),
            )
        )
        names = ("gate_bias", "up_bias", "down_bias")
        extra = dict(zip(names, (take(expert_dim), take(expert_dim), take(hidden)), strict=True)) if biases else {}
        down = take(hidden, expert_dim)
        matrices[expert] = gpu.ExpertMatrices(
            gate=gate, up=up, down=down, activation=gpu.Activation(name=activation), **extra
        )
    return Layer(buffer, matrices, num_experts)


def expected_sums(layer, x, ids, weights, before):
    """`before` plus every pair's expert output, h and the outputs rounded where the kernel says it rounds; and the sums
    of their absolute values, which roundings follow where outputs cancel out."""
    out, dtype = before.double().cpu(), x.dtype
    sizes = out.abs()
    for expert, m in layer.matrices.items():
        tokens, choices = (ids.cpu() == expert).nonzero(as_tuple=True)
        rows = x.cpu().double()[tokens]
        gate, up, down = (w.double().cpu() for w in (m.gate, m.up, m.down))
        g, u = rows @ gate.T, rows @ up.T
        if m.biases:
            g, u = g + m.gate_bias.double().cpu(), u + m.up_bias.double().cpu()
        h = torch.from_numpy(reference.gated(g.numpy(), u.numpy(), m.activation.name)).to(dtype).double()
        y = h @ down.T + (m.down_bias.double().cpu() if m.biases else 0)
        weighted = y.to(dtype).double() * weights.cpu().double()[tokens, choices, None]
        out.index_add_(0, tokens, weighted)
        sizes.index_add_(0, tokens, weighted.abs())
    return out, sizes


def route(kind, num_tokens, num_experts, top_k, generator):
    if kind == "one":  # every token's first choice is the same expert
        others = [e for e in range(num_experts) if e != num_experts // 2]
        return torch.tensor([num_experts // 2, *others[: top_k - 1]]).expand(num_tokens, top_k).contiguous()
    few = max(top_k, num_experts // 2) if kind == "few" else num_experts  # "few": some experts get none
    rows = [torch.randperm(few, generator=generator)[:top_k] for _ in range(num_tokens)]
    return torch.stack(rows) if rows else torch.empty(0, top_k, dtype=torch.int64)


def check(device, layer, dtype, num_tokens, top_k, *, kind="any", scratch_bytes=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = layer.shape.hidden
    x = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
    ids = route(kind, num_tokens, layer.num_experts, top_k, generator).to(device)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
    before = torch.randn(num_tokens, hidden, generator=generator).to(device)
    scratch = None
    if scratch_bytes is not None:
        scratch = torch.full((scratch_bytes,), 0xFF, dtype=torch.uint8, device=device)
    out = before.clone()
    num_present = len(layer.matrices)
    gpu.grouped_experts(x, ids, weights, out, layer.table(), layer.shape, num_present=num_present, scratch=scratch)
    expected, sizes = expected_sums(layer, x, ids, weights, before)
    scale = sizes.max().item() if num_tokens else 1.0
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype] * max(scale, 1.0))
    return out


@quick
@given(
    dtype=st.sampled_from(tuple(TOLERANCE)),
    num_tokens=st.integers(0, 45),
    hidden=st.integers(1, 80),
    expert_dim=st.integers(1, 70),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    kind=st.sampled_from(("any", "few", "one")),
    absent=st.sets(st.integers(0, 8)),
    biases=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_routing(
    device, dtype, num_tokens, hidden, expert_dim, num_experts, top_k, kind, absent, biases, seed
):
    present = sorted(set(range(num_experts)) - absent) or [0]
    layer = make_layer(
        device, dtype, hidden=hidden, expert_dim=expert_dim, num_experts=num_experts, present=present, biases=biases,
        seed=seed,
    )  # fmt: skip
    check(device, layer, dtype, num_tokens, min(top_k, num_experts), kind=kind, seed=seed)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_activations(device, activation):
    layer = make_layer(
        device, torch.float32, hidden=32, expert_dim=24, num_experts=3, present=range(3), activation=activation
    )
    check(device, layer, torch.float32, 9, 2)


def test_many_tokens(device, monkeypatch):
    """More pairs than one program counts, more chunks than the offsets' program takes at once, several tiles each."""
    monkeypatch.setattr("kernels.triton.grouping._BLOCK", 4)  # 32 of them would take tokens by the hundred
    layer = make_layer(device, torch.float32, hidden=16, expert_dim=16, num_experts=6, present=range(6))
    check(device, layer, torch.float32, 130, 4)  # 520 pairs: 9 chunks of 64, 3 tiles or more for each expert


@pytest.mark.parametrize("together_bytes", [0, 16_000, 1 << 20])
def test_column_tiles_in_any_groups(device, monkeypatch, together_bytes):
    """One by one, in groups of which the last is smaller, and all at once; each expert has several row tiles."""
    monkeypatch.setattr("kernels.triton.tiling._TOGETHER_BYTES", together_bytes)
    layer = make_layer(device, torch.float32, hidden=20, expert_dim=340, num_experts=2, present=range(2))
    monkeypatch.setattr("kernels.triton.tiling._FLOAT", {16: (64, 32, 4)})
    tiles = expert_tiles(4, 16.0, 2, Chip())
    groups = columns_together(tiles, 2, 20, 4)
    assert (tiles.columns, groups) == (32, {0: 1, 16_000: 3, 1 << 20: 8}[together_bytes])  # of 11 column tiles
    check(device, layer, torch.float32, 37, 2)


def test_little_scratch_takes_several_runs(device):
    layer = make_layer(device, torch.float32, hidden=32, expert_dim=40, num_experts=4, present=range(4))
    needed = gpu.expert_scratch_bytes(6, 2, 4, 4, layer.shape)
    check(device, layer, torch.float32, 21, 2, scratch_bytes=needed)
    with pytest.raises(ValueError, match="scratch: expected at least"):
        check(device, layer, torch.float32, 21, 2, scratch_bytes=64)


def test_one_expert_after_another_is_all_at_once(device):
    """Strategies call experts singly, in pages or all together."""
    whole = make_layer(device, torch.float32, hidden=32, expert_dim=24, num_experts=4, present=range(4))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 32, generator=generator).to(device)
    ids, weights = route("any", 13, 4, 2, generator).to(device), torch.rand(13, 2, generator=generator).to(device)
    once, apart = torch.zeros(13, 32, device=device), torch.zeros(13, 32, device=device)
    gpu.grouped_experts(x, ids, weights, once, whole.table(), whole.shape, num_present=4)
    for expert in (0, 1, 2, 3):
        part = replace(whole, matrices={expert: whole.matrices[expert]})
        gpu.grouped_experts(x, ids, weights, apart, part.table(), part.shape, num_present=1)
    torch.testing.assert_close(apart, once, rtol=1e-5, atol=1e-6)


def test_the_same_bits_every_time(device):
    layer = make_layer(device, torch.bfloat16, hidden=48, expert_dim=40, num_experts=6, present=range(6))
    first = check(device, layer, torch.bfloat16, 40, 4)
    assert torch.equal(check(device, layer, torch.bfloat16, 40, 4), first)


def test_ids_out_of_range_add_nothing(device):
    """Poisoned memory must not become an address."""
    layer = make_layer(device, torch.float32, hidden=16, expert_dim=16, num_experts=3, present=range(3))
    ids = torch.tensor([[-1, 1], [3, 2**40]], device=device)
    out = torch.zeros(2, 16, device=device)
    x, weights = torch.ones(2, 16, device=device), torch.ones(2, 2, device=device)
    gpu.grouped_experts(x, ids, weights, out, layer.table(), layer.shape, num_present=3)
    assert out[0].abs().sum() > 0 and not out[1].any()


def test_interleaved_rows_need_no_copy(device):
    both = torch.randn(48, 32, device=device) / 6
    down = torch.randn(32, 24, device=device) / 5
    m = gpu.ExpertMatrices(gate=both[0::2], up=both[1::2], down=down)
    assert m.addresses[1] - m.addresses[0] == 32 * 4
    check(device, Layer(both, {0: m}, 1), torch.float32, 5, 1)


def test_wrong_matrices_are_named(device):
    gate, down = torch.zeros(8, 16, device=device), torch.zeros(16, 8, device=device)
    with pytest.raises(ValueError, match="up: expected \\(8, 16\\)"):
        _ = gpu.ExpertMatrices(gate=gate, up=gate[:4], down=down).shape
    with pytest.raises(ValueError, match="down: expected contiguous rows"):
        _ = gpu.ExpertMatrices(gate=gate, up=gate, down=torch.zeros(8, 16, device=device).T).shape
    with pytest.raises(ValueError, match="up: expected rows 16 apart"):
        _ = gpu.ExpertMatrices(gate=gate, up=torch.zeros(8, 32, device=device)[:, :16], down=down).shape
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        odd = torch.zeros(8 * 16 + 1, device=device)[1:].view(8, 16)
        _ = gpu.ExpertMatrices(gate=odd, up=gate, down=down).addresses
    with pytest.raises(ValueError, match="all or none"):
        _ = gpu.ExpertMatrices(gate=gate, up=gate, down=down, up_bias=gate[:, 0].contiguous()).shape
    with pytest.raises(ValueError, match="activation: expected one of silu"):
        gpu.Activation(name="relu")


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_warming_up_meets_every_tile(element_bytes):
    """Each number of tokens an expert has a tile that `warm_up` has compiled."""
    warm = {expert_tiles(element_bytes, mean, 1, Chip()).rows for mean in mean_choices(element_bytes)}
    assert warm == {expert_tiles(element_bytes, tokens / 8, 1, Chip()).rows for tokens in range(1, 4000)}


def test_a_tile_is_higher_than_the_average():
    """Half of the experts get more tokens than that, and each further tile reads the weights again."""
    assert [expert_tiles(2, mean, 1, Chip()).rows for mean in (1, 10, 16, 21, 42, 128)] == [16, 16, 32, 32, 64, 128]
