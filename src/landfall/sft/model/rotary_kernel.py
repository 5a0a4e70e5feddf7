"""Turning heads on a GPU in one pass: what torch does in four kernels, at the speed of memory.

Imported only where triton is (it comes with torch's CUDA builds).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    heads, cos, sin, turned,
    token_stride, head_stride, angle_stride, turned_token_stride, turned_head_stride, num_heads, direction,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < num_heads) & (column < HALF)
    angle = token * angle_stride + column
    cosine = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32) * direction
    source = heads + token * token_stride + head * head_stride + column
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = turned + token * turned_token_stride + head * turned_head_stride + column
    tl.store(target, (left * cosine - right * sine).to(turned.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (right * cosine + left * sine).to(turned.dtype.element_ty), mask=inside)


def turn_heads(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """``heads`` [T, ..., d] with at most one dimension longer than 1 between, ``cos`` and ``sin``
    [T, ..., d / 2], the same for all heads; contiguous in the last dimension."""
    flat = heads.reshape(heads.shape[0], -1, heads.shape[-1])
    cos, sin = (angle.reshape(len(flat), -1).contiguous() for angle in (cos, sin))
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    turned = torch.empty(flat.shape, dtype=heads.dtype, device=heads.device)
    num_tokens, num_heads, size = flat.shape
    half_block = triton.next_power_of_2(size // 2)
    head_block = min(triton.next_power_of_2(num_heads), max(1, _BLOCK_ELEMENTS // half_block))
    grid = (num_tokens, triton.cdiv(num_heads, head_block))
    _turn_heads[grid](
        flat, cos, sin, turned,
        flat.stride(0), flat.stride(1), cos.stride(0), turned.stride(0), turned.stride(1), num_heads, direction,
        HALF=size // 2, HALF_BLOCK=half_block, HEAD_BLOCK=head_block,
    )  # fmt: skip
    return turned.view(heads.shape)
