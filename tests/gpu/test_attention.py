"""The kernel that is used on GPUs computes what the plain one does. Skips itself without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from landfall.sft.model.attention import Rows, attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = {
    "equal": ((512, 512), (512, 512)),
    "different": ((3, 700, 1, 129), (3, 700, 1, 129)),
    "begun elsewhere": ((100, 300), (411, 300)),
}


def heads(num_tokens: int, num_keys: int, query_heads: int, key_heads: int, size: int) -> list[Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(num_tokens, query_heads, size), (num_keys, key_heads, size), (num_keys, key_heads, size)]
    made = [torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def both_ways(inputs: list[Tensor], rows: Rows, causal: bool) -> list[Tensor]:
    """Output, and the gradients of the three inputs."""
    attended = attend(*inputs, rows, causal=causal, scale=None)
    pull = torch.randn(attended.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return [attended.detach(), *torch.autograd.grad(attended, inputs, pull.to(attended.dtype))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(32, 8, 128), (16, 16, 64), (16, 16, 72), (4, 2, 32)])
@pytest.mark.parametrize("case", ROWS)
def test_flash_kernel_equals_plain_attention_in_float32(
    case: str, sizes: tuple[int, int, int], causal: bool
) -> None:
    query_lengths, key_lengths = ROWS[case]
    rows = Rows.of(query_lengths, torch.device("cuda"), key_lengths=key_lengths)
    inputs = heads(sum(query_lengths), sum(key_lengths), *sizes)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    for ours, expected in zip(both_ways(inputs, rows, causal), both_ways(exact, rows, causal), strict=True):
        difference = (ours.float() - expected).norm() / expected.norm()
        assert difference < 1e-2


def test_flash_kernel_takes_no_memory_for_scores() -> None:
    lengths = (4096,) * 4
    rows, inputs = Rows.of(lengths, torch.device("cuda")), heads(4 * 4096, 4 * 4096, 32, 8, 128)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both_ways(inputs, rows, causal=True)
    all_scores_bytes = 4 * 32 * 4096 * 4096 * 2
    assert torch.cuda.max_memory_allocated() - before < all_scores_bytes / 2
