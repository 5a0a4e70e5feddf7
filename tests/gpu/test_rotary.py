"""The one-pass kernel turns heads as the plain code does. Skips itself without a GPU."""

from __future__ import annotations

import pytest
import torch

from landfall.sft.model.rotary import Angles, rotate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [((1, 32), 128), ((32,), 64), ((1, 3), 72), ((5,), 16)])
def test_kernel_equals_plain_rotation_both_ways(
    heads: tuple[int, ...], size: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    angles = torch.randn(77, *(1 for _ in heads), size // 2, generator=draw)
    joined = torch.randn(77, *heads[:-1], heads[-1] + 3, size, generator=draw).to(dtype)
    pull = torch.randn(77, *heads, size, generator=draw).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        source = joined.detach().to(device).requires_grad_()
        turning = source[..., : heads[-1], :]  # a view with gaps, as from a fused projection
        turned = rotate(turning, Angles(angles.cos().to(device), angles.sin().to(device)))
        results.append([turned.detach().cpu(), torch.autograd.grad(turned, source, pull.to(device))[0].cpu()])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for plain, kernel in zip(*results, strict=True):
        assert torch.allclose(plain.float(), kernel.float(), atol=tolerance, rtol=tolerance)
