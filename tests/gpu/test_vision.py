"""Recomputation in the vision tower changes no gradient. Skips itself without a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.sft.model import tiny

from landfall.sft.model.vision import build_tower, look

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("grids", [((1, 8, 8), (1, 8, 8)), ((1, 8, 8), (1, 4, 12), (1, 2, 2))])
def test_gradient_checkpointing_gives_the_same_gradients_bit_for_bit(
    grids: tuple[tuple[int, ...], ...],
) -> None:
    config = tiny.config().vision_config
    grid_thw = torch.tensor(grids)
    pixels = torch.randn(int(grid_thw.prod(1).sum()), tiny.PATCH_VALUES).cuda()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            tower = build_tower(config, checkpointing).bfloat16().train()
        features = look(tower, pixels, grid_thw)
        (features.tokens.float().square().sum() + features.deepstack.float().sum()).backward()
        gradients.append([p.grad for p in tower.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
