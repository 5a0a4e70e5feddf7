from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import conv3d
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from landfall.errors import DataError
from landfall.sft.data.batch import collate
from landfall.sft.model.vision import blank_image, build_tower, look
from tests.sft.model import tiny

GRIDS = [[1, 4, 4], [1, 2, 6], [2, 4, 2], [1, 4, 4]]


def towers() -> tuple[Qwen3VLVisionModel, Qwen3VLVisionModel]:
    hf_config = tiny.config().vision_config
    torch.manual_seed(0)
    theirs = Qwen3VLVisionModel(hf_config)
    ours = build_tower(hf_config, gradient_checkpointing=False)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("grids", [GRIDS, [[1, 4, 4]] * 3], ids=["different", "equal"])
def test_features_equal_transformers_own_tower(grids: list[list[int]]) -> None:
    theirs, ours = towers()
    grid_thw = torch.tensor(grids)
    pixels = torch.randn(int(grid_thw.prod(1).sum()), tiny.PATCH_VALUES)
    expected, features = theirs(pixels, grid_thw=grid_thw), look(ours, pixels, grid_thw)
    torch.testing.assert_close(features.tokens, expected.pooler_output, rtol=1e-5, atol=1e-6)
    deepstack = torch.stack(expected.deepstack_features)
    torch.testing.assert_close(features.deepstack, deepstack, rtol=1e-5, atol=1e-6)


def test_tower_leaves_the_callers_config_alone() -> None:
    hf_config = tiny.config()
    build_tower(hf_config.vision_config, gradient_checkpointing=True)
    assert hf_config.to_dict() == tiny.config().to_dict()


def test_patch_projection_equals_the_convolution() -> None:
    _, ours = towers()
    projection = ours.patch_embed.proj
    patches = torch.randn(5, 3, 2, 4, 4)
    expected = conv3d(patches, projection.weight, projection.bias, stride=projection.stride).flatten(1)
    torch.testing.assert_close(projection(patches), expected, rtol=1e-5, atol=1e-6)


def test_blank_image_makes_one_token() -> None:
    _, ours = towers()
    features = look(ours, *blank_image(ours))
    assert features.tokens.shape == (1, 64) and features.deepstack is not None
    assert features.tokens.isfinite().all() and features.deepstack.isfinite().all()


def test_rows_without_images_are_not_changed_by_the_blank_image() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    batch = tiny.joined("text", "text")
    with_tower = model(batch)
    with_tower.sum().backward()
    for name, parameter in model.visual.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    model.visual.requires_grad_(False)
    assert torch.equal(model(batch), with_tower)


def test_image_tokens_that_do_not_fit_the_images_are_refused() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    batch = tiny.joined("image")
    with pytest.raises(DataError, match="image tokens"):
        model(replace(batch, grid_thw=torch.tensor([[1, 4, 6]])))
    with pytest.raises(DataError, match="image tokens"):
        model(replace(batch, grid_thw=None, pixel_values=None))


def test_order_of_rows_does_not_mix_up_their_images() -> None:
    model = tiny.make(tiny.reference(tiny.config()))
    first, second = tiny.row("image", 9, 1), tiny.row("images", 9, 2)
    forth, back = model(collate([first, second])), model(collate([second, first]))
    half = int((first.labels != -100).sum())
    torch.testing.assert_close(forth, torch.cat([back[-half:], back[:-half]]), rtol=1e-5, atol=1e-5)
