from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from landfall.errors import UsageError
from landfall.sft.model.freeze import apply_freeze, part_of
from tests.sft.model import tiny
from tests.sft.model.training import OPTIMIZER, Plan, train

PARTS = ("llm", "vit", "aligner")


def trained_parts(freeze: tuple[bool, bool, bool]) -> set[str]:
    model = tiny.make(tiny.reference(tiny.config()))
    apply_freeze(model, *freeze)
    return {part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_combination_trains_the_rest() -> None:
    for bits in range(7):
        freeze = tuple(bool(bits >> i & 1) for i in range(3))
        assert trained_parts(freeze) == {p for p, frozen in zip(PARTS, freeze, strict=True) if not frozen}


def test_mergers_are_the_aligner() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    aligners = {name.split(".")[1] for name, _ in model.named_parameters() if part_of(name) == "aligner"}
    assert aligners == {"merger", "deepstack_merger_list"}


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        trained_parts((True, True, True))


@pytest.mark.parametrize("freeze", [(False, True, True), (True, True, False), (True, False, True)])
def test_frozen_parts_keep_their_weights_while_the_rest_learns(freeze: tuple[bool, bool, bool]) -> None:
    before = {
        name: p.detach().clone() for name, p in tiny.make(tiny.reference(tiny.config())).named_parameters()
    }
    after = train(
        Plan(num_steps=3, freeze=freeze, optimizer=replace(OPTIMIZER, lr_warmup_iters=0))
    ).parameters
    for name, parameter in after.items():
        frozen = freeze[PARTS.index(part_of(name))]
        padding = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        rows = slice(0, tiny.VOCAB if padding else None)
        assert torch.equal(parameter[rows], before[name][rows]) == frozen, name


def test_frozen_vision_tower_is_not_run_without_images() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    calls: list[int] = []
    model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    apply_freeze(model, False, True, True)
    model(tiny.joined("text"))
    assert not calls
    losses = model(tiny.joined("image"))
    assert calls and losses.requires_grad
    apply_freeze(model, False, False, True)
    calls.clear()
    model(tiny.joined("text"))
    assert calls
