from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from landfall.errors import DataError, UsageError
from landfall.sft.data.images import UNREADABLE
from landfall.sft.data.processor import Processor


def test_photo_of_640_by_480_becomes_300_tokens(processor: Processor, image: Callable[..., Path]) -> None:
    grid = processor.images.header(str(image("a.png", 640, 480))).grid_thw
    assert grid == (1, 30, 40)
    assert processor.images.num_tokens(grid) == 300


@given(width=st.integers(1, 300), height=st.integers(1, 300), max_tokens=st.sampled_from([4, 9, 50, None]))
@settings(max_examples=40, deadline=None)
def test_grid_from_the_header_equals_the_grid_of_the_pixels(
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
    height: int,
    max_tokens: int | None,
) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    reader = Processor.from_folder(model_folder, max_tokens).images
    path = str(tmp_path_factory.mktemp("image") / "a.png")
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(path)
    grid = reader.header(path).grid_thw
    pixels = reader.pixels([path], np.array([grid]), "here")
    assert pixels.shape == (np.prod(grid), 3 * 2 * 16 * 16)


@pytest.mark.parametrize("max_tokens", [16, 100, 1600])
def test_image_max_token_num_bounds_the_tokens_of_an_image(
    model_folder: Path, image: Callable[..., Path], max_tokens: int
) -> None:
    reader = Processor.from_folder(model_folder, max_tokens).images
    num_tokens = reader.num_tokens(reader.header(str(image("big.png", 2000, 1500))).grid_thw)
    assert reader.max_pixels == max_tokens * 32 * 32
    assert 0.7 * max_tokens <= num_tokens <= max_tokens


def test_image_max_token_num_unset_allows_16384_tokens(processor: Processor) -> None:
    assert processor.images.max_pixels == 16384 * 32 * 32


def test_image_max_token_num_below_the_least_size_wins(model_folder: Path) -> None:
    reader = Processor.from_folder(model_folder, 2).images
    assert reader.min_pixels == reader.max_pixels == 2 * 32 * 32


def test_image_max_token_num_of_zero_is_refused(model_folder: Path) -> None:
    with pytest.raises(UsageError, match="IMAGE_MAX_TOKEN_NUM"):
        Processor.from_folder(model_folder, 0)


def test_photo_taken_upright_is_turned_before_it_is_measured(processor: Processor, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = str(tmp_path / "turned.jpg")
    noise = np.random.default_rng(0).integers(0, 256, (96, 320, 3), np.uint8)
    Image.fromarray(noise).save(path, exif=exif)
    grid = processor.images.header(path).grid_thw
    assert grid == (1, 20, 6)
    pixels = processor.images.pixels([path], np.array([grid]), "here")
    upright = str(tmp_path / "upright.png")
    with Image.open(path) as turned:
        turned.transpose(Image.Transpose.ROTATE_270).save(upright)
    assert pixels.equal(processor.images.pixels([upright], np.array([grid]), "here"))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_image_of_any_mode_becomes_patches(processor: Processor, tmp_path: Path, mode: str) -> None:
    path = str(tmp_path / "a.tif")
    Image.new(mode, (96, 64)).save(path)
    grid = processor.images.header(path).grid_thw
    assert processor.images.pixels([path], np.array([grid]), "here").shape == (24, 1536)


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_file_that_is_cut_short_is_found_by_its_header(
    processor: Processor, image: Callable[..., Path], suffix: str, share: float
) -> None:
    path = image("a" + suffix, 320, 240)
    processor.images.header(str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UNREADABLE):
        processor.images.header(str(path))


def test_image_longer_than_200_times_its_width_is_refused(
    processor: Processor, image: Callable[..., Path]
) -> None:
    with pytest.raises(ValueError, match="aspect ratio"):
        processor.images.header(str(image("thin.png", 1000, 4)))


def test_image_replaced_by_another_size_is_refused_at_training(
    processor: Processor, image: Callable[..., Path]
) -> None:
    grid = np.array([processor.images.header(str(image("a.png", 64, 64))).grid_thw])
    path = str(image("a.png", 96, 64))
    with pytest.raises(DataError, match="An image has changed") as caught:
        processor.images.pixels([path], grid, "train.jsonl:7")
    assert "train.jsonl:7" in str(caught.value)
    assert "[[1, 4, 4]]" in str(caught.value)


def test_folder_without_image_processor_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    with pytest.raises(UsageError, match="no image processor"):
        Processor.from_folder(tmp_path)


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such model folder"):
        Processor.from_folder(tmp_path / "nowhere")


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        Processor.from_folder(tmp_path)
