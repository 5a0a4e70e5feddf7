"""Rows without images among rows with images: no rank waits for another, and the losses are one rank's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from landfall.sft.data.sampler import Stream
from tests.sft.trainer import Sft, picture, row, write_rows

Train = Callable[..., Sft]
TRAINING: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 8, "timeout_s": 60}


def rows_with_images(folder: Path, has_image: list[bool]) -> Path:
    image = picture(folder / "image.png", 64, seed=0)
    rows = [
        row("<image>Which digit is this?", str(number), image)
        if has
        else row(f"{number} + 1?", str(number + 1))
        for number, has in enumerate(has_image)
    ]
    return write_rows(folder / "mixed.jsonl", rows)


@pytest.mark.case("f02")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_ranks_with_and_without_images_train_as_one_rank(overlap: bool, tmp_path: Path, sft: Train) -> None:
    has_image = [number % 3 == 0 for number in range(16)]
    stream = Stream(16, 16, 2, seed=42)
    steps = [tuple(has_image[number] for number in stream.rows(step)) for step in range(8)]
    assert {(True, False), (False, True), (False, False)} <= set(steps), "a step of each kind is needed"

    data = rows_with_images(tmp_path, has_image)
    together = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    two = sft(ranks=2, dataset=data, **together, **TRAINING)
    one = sft(dataset=data, **TRAINING)
    assert list(two.losses) == list(range(1, 9))
    assert two.losses == pytest.approx(one.losses, abs=1e-5)


@pytest.mark.case("f02")
def test_vision_tower_trains_on_without_any_image(tmp_path: Path, sft: Train) -> None:
    data = rows_with_images(tmp_path, [False] * 16)
    two = sft(ranks=2, dataset=data, **TRAINING)
    assert two.losses == pytest.approx(sft(dataset=data, **TRAINING).losses, abs=1e-5)
