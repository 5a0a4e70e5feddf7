"""What test_bench runs on real ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from landfall.repro.bench import Bench, import_everything
from landfall.repro.cases import Launch
from landfall.repro.diary import Diary, DiaryReader, Orders
from landfall.repro.outcome import Attempt
from landfall.repro.training import Training


def take_all(launch: Launch, folder: str) -> dict[str, Attempt]:
    """The launch's steps on this rank; what it wrote down last about each."""
    import_everything(on_gpu=False)
    path = Path(folder, f"{os.environ['RANK']}.diary")
    bench = Bench.set_up(Orders(launch, on_gpu=False), Diary(path))
    for step in launch.steps:
        bench.take(step)
    bench.close()
    return {event.step: event.attempt for event in DiaryReader(path).read() if event.attempt is not None}


def train() -> tuple[list[float], float, list[float], list[int]]:
    """Losses, evaluation loss, the sum of each layer, and the shape of this rank's momentum."""
    import_everything(on_gpu=False)
    dist.init_process_group("tripwire")
    group = dist.group.WORLD
    assert group is not None
    training = Training(group, torch.device("cpu"))
    losses, evaluation = training.run()
    sums = [layer.detach().double().sum().item() for layer in training.layers.values()]
    return losses, evaluation, sums, list(training.momentum.shape)
