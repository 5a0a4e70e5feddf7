"""The same logits and gradients as transformers' Qwen3VLForConditionalGeneration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3VLForConditionalGeneration

from landfall.sft.data.batch import Example, collate
from landfall.sft.model.build import ModelOptions
from landfall.sft.model.qwen3_vl import Qwen3VLModel
from tests.sft.model import tiny

KINDS = {
    "text": ["text"],
    "image": ["image"],
    "images": ["images"],
    "rows": ["image", "text", "images", "image"],
    "equal rows": ["image", "image"],
}


def examples_of(case: str) -> list[Example]:
    if case == "equal rows":
        return [tiny.row("image", 9, seed) for seed in (1, 2)]
    return tiny.rows(KINDS[case], seed=1)


def reference_gradients(
    hf: Qwen3VLForConditionalGeneration, examples: list[Example]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss sum of rows given one at a time, and the gradients under Hugging Face's names."""
    hf.zero_grad()
    logits = [tiny.answer(hf, example) for example in examples]
    losses = [
        cross_entropy(one[:-1], example.labels[1:], reduction="sum")
        for one, example in zip(logits, examples, strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in hf.named_parameters()}
    found = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    return loss.detach(), zeros | found


def largest_difference(
    hf: Qwen3VLForConditionalGeneration, model: Qwen3VLModel, expected: dict[str, torch.Tensor]
) -> float:
    """Of any parameter's gradient, relative to its norm (or to all gradients' where it should be zero)."""
    table, worst = tiny.names(hf.config, model), 0.0
    scale = torch.stack([gradient.norm() for gradient in expected.values()]).max()
    for name, parameter in tiny.parameters(model):
        assert parameter.grad is not None, name
        wanted = tiny.gathered(expected, table.pieces(name), parameter.shape[0])
        norm = wanted.norm() if wanted.norm() > 0 else scale
        worst = max(worst, float((parameter.grad.float() - wanted).norm() / norm))
    return worst


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", KINDS)
def test_model_logits_and_gradients_equal_transformers(case: str, tied: bool) -> None:
    hf = tiny.reference(tiny.config(tied))
    model, examples = tiny.make(hf), examples_of(case)
    batch = collate(examples)

    logits = torch.cat([tiny.answer(hf, example) for example in examples])
    assert (model.logits(batch) - logits).abs().max() <= 1e-5

    loss, gradients = reference_gradients(hf, examples)
    ours = model(batch).sum()
    ours.backward()
    assert float(ours) == pytest.approx(float(loss), rel=1e-6)
    assert largest_difference(hf, model, gradients) <= 1e-5


def test_rows_joined_do_not_see_each_other() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    examples = tiny.rows(["image", "text"], seed=2)
    alone = torch.cat([model.logits(collate([example])) for example in examples])
    assert (model.logits(collate(examples)) - alone).abs().max() <= 1e-5


def test_every_part_of_the_input_matters() -> None:
    """The parity above could not be seen to fail otherwise: each change moves the logits by far more."""
    hf = tiny.reference(tiny.config())
    model, batch = tiny.make(hf), tiny.joined("image", seed=1)
    assert batch.pixel_values is not None
    before = model.logits(batch)
    moved = batch.position_ids.clone()
    moved[1, 4:] += 3
    for changed in (
        replace(batch, pixel_values=batch.pixel_values + 0.1),
        replace(batch, position_ids=moved),
    ):
        assert (model.logits(changed) - before).abs().max() > 1e-3

    level = model.visual.deepstack_merger_list[1].linear_fc2.weight
    level.data *= 1.1
    assert (model.logits(batch) - before).abs().max() > 1e-3


def test_bf16_model_stays_close_to_float32() -> None:
    """As close as transformers' own bfloat16 model comes: 8 bits of mantissa through 4 layers."""
    hf = tiny.reference(tiny.config())
    model = tiny.make(hf, ModelOptions(bf16=True))
    examples = tiny.rows(["image", "text"], seed=1)
    exact = torch.cat([tiny.answer(hf, example) for example in examples])
    rounded = torch.cat([tiny.answer(hf.bfloat16(), example) for example in examples]).float()
    ours = model.logits(collate(examples)).float()
    scale = exact.abs().max()
    theirs = (rounded - exact).abs().max() / scale
    assert (ours - exact).abs().max() / scale <= max(2e-2, float(theirs))
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
