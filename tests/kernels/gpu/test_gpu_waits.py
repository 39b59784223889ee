"""On a GPU only: no kernel waits for the device, and after `warm_up` none is compiled."""

import pytest
import torch

from kernels import triton as gpu

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HIDDEN, EXPERT_DIM, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 256, 512, 8, 8, 2, 64, 16


def one_layer(device, num_tokens):
    """Every kernel once, on `num_tokens` tokens."""

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    matrices = {
        e: gpu.ExpertMatrices(
            gate=randn(EXPERT_DIM, HIDDEN), up=randn(EXPERT_DIM, HIDDEN), down=randn(HIDDEN, EXPERT_DIM)
        )
        for e in range(EXPERTS)
    }
    table = gpu.address_table({e: m.addresses for e, m in matrices.items()}, EXPERTS, device)
    ids, weights = gpu.choose_experts(randn(num_tokens, EXPERTS), 2)
    out = torch.zeros(num_tokens, HIDDEN, device=device)
    gpu.grouped_experts(randn(num_tokens, HIDDEN), ids, weights, out, table, matrices[0].shape, num_present=EXPERTS)
    q, kv = randn(num_tokens, HEADS, HEAD_DIM), randn(num_tokens, KV_HEADS, HEAD_DIM)
    positions = torch.arange(num_tokens + 1, device=device)[1:]  # as a view into a buffer: not on 16 bytes
    positions -= 1
    gpu.causal_attention(q, kv, kv, positions, torch.empty_like(q), scale=0.125)
    staging, firsts = randn(2 * num_tokens * KV_HEADS * HEAD_DIM), torch.zeros_like(positions)
    gpu.staged_decode_attention(q, staging, firsts, torch.empty_like(q), num_kv_heads=KV_HEADS, scale=0.125)
    cache, blocks = randn(3, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.zeros(num_tokens, dtype=torch.int32, device=device)
    gpu.paged_decode_attention(q, cache, cache, blocks, firsts, torch.empty_like(q), scale=0.125)
    for dtype in (torch.uint8, torch.int64):
        rows = torch.zeros(num_tokens, dtype=dtype).pin_memory()
        gpu.bring(torch.empty(num_tokens, dtype=dtype, device=device), rows)
        gpu.keep(rows)
    host_cache, lengths = cache.new_zeros(cache.shape, device="cpu").pin_memory(), torch.ones(num_tokens).int()
    numbers = gpu.gather_numbers(torch.zeros(num_tokens, 1).int(), lengths, 2 * KV_HEADS * HEAD_DIM).pin_memory()
    gathered = randn(num_tokens * 2 * KV_HEADS * HEAD_DIM)
    gpu.gather_kv([host_cache, host_cache], numbers, num_tokens, 1, gathered)
    gpu.keep(host_cache)
    gpu.keep(numbers)
    return matrices[0].shape


def test_nothing_waits_and_nothing_is_compiled_late(device):
    from triton.runtime.jit import JITFunction

    shape = one_layer(device, 3)
    sizes = {"num_experts": EXPERTS, "top_k": 2, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    gpu.warm_up(gpu.Shapes(experts=shape, kv_block_size=BLOCK_SIZE, **sizes), device)
    compiled, original = [], JITFunction._do_compile

    def noticed(self, *arguments, **options):
        compiled.append(self.fn.__name__)
        return original(self, *arguments, **options)

    JITFunction._do_compile = noticed
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_tokens in (1, 2, 16, 63, 64, 65, 200, 513, 2000):
            one_layer(device, num_tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        JITFunction._do_compile = original
    assert compiled == []
