"""What all tests of the trainer share: a tiny model, rows with pictures, and a fast way to start ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from landfall.demo.model import write_model
from landfall.testing import procs
from tests.sft.trainer import Sft, World, picture, row, run_sft, write_rows

NUM_ROWS = 48

# Every rank of every test would import them anew.
procs.PRELOADED.extend(("datasets", "landfall.sft.loop", "torch.utils.tensorboard", "matplotlib.pyplot"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    rows = []
    for number in range(NUM_ROWS):
        picture(folder / "data" / "images" / f"{number}.png", 64, seed=number)
        answer = f"This is {number}, and it is written by hand." if number % 3 == 0 else str(number)
        rows.append(row("<image>Which digit is this?", answer, f"images/{number}.png"))
    return World(folder / "model", write_rows(folder / "data" / "train.jsonl", rows), folder / "cache")


@pytest.fixture
def sft(world: World, tmp_path: Path) -> Callable[..., Sft]:
    """``sft(ranks=1, **flags)`` trains and saves into tmp_path/out."""
    return partial(run_sft, world, tmp_path / "out")
