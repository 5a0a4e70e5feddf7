"""Recomputation changes memory, and not one bit of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from landfall.sft.data.batch import MicroBatch, collate
from landfall.sft.model.build import ModelOptions
from tests.sft.model import tiny
from tests.sft.model.peak import peak_bytes

FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_num_layers": 1}
WAYS: dict[str, dict[str, Any]] = {
    "uniform": {**FULL, "recompute_method": "uniform"},
    "uniform 2": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {**FULL, "recompute_method": "block"},
    "selective": {"recompute_granularity": "selective"},
    "vision": {"vit_gradient_checkpointing": True},
}


def run(
    options: ModelOptions, batch: MicroBatch, layers: int = 4
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    model = tiny.make(tiny.reference(tiny.config(num_hidden_layers=layers)), options)
    losses: list[torch.Tensor] = []

    def both_ways() -> None:
        losses.append(model(batch))
        losses[0].sum().backward()

    peak = peak_bytes(both_ways)
    return losses[0].detach(), {name: p.grad for name, p in model.named_parameters()}, peak


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_changes_no_bit_of_losses_and_gradients(way: str, bf16: bool) -> None:
    batch = tiny.joined("image", "text", "images")
    losses, gradients, _ = run(ModelOptions(bf16=bf16), batch)
    again, recomputed, _ = run(ModelOptions(bf16=bf16, **WAYS[way]), batch)
    assert torch.equal(losses, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_full_recomputation_lowers_the_peak() -> None:
    batch = collate([tiny.row("text", 400, seed) for seed in range(2)])
    _, _, kept = run(ModelOptions(), batch, layers=12)
    _, _, recomputed = run(ModelOptions(**WAYS["uniform"]), batch, layers=12)
    assert recomputed < kept / 2


def test_vision_checkpointing_lowers_the_peak() -> None:
    batch = tiny.joined(*["image"] * 40)
    _, _, kept = run(ModelOptions(**WAYS["uniform"]), batch)
    _, _, recomputed = run(ModelOptions(**WAYS["uniform"], **WAYS["vision"]), batch)
    assert recomputed < kept * 0.8
