"""The trained tensors as each writer wants them described, and whether they came back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from landfall.engine.stage import host_bytes
from landfall.format.index import digest
from landfall.repro.training import Training

MOMENTUM_KEY = "optimizer.momentum"


class Tensors:
    """What one rank saves and loads: ``replicated`` on all ranks, ``own`` rows of one of ``own_shape``."""

    def __init__(self, training: Training) -> None:
        self.rank, self.size = training.rank, training.size
        self.replicated = {key: layer.detach() for key, layer in training.layers.items()}
        self.own = training.momentum
        self.own_shape = (training.num_own_rows * training.size, *training.momentum.shape[1:])
        self._trained = {key: tensor.to("cpu", copy=True) for key, tensor in self.all().items()}

    def all(self) -> dict[str, Tensor]:
        """Every tensor of this rank by key."""
        return {**self.replicated, MOMENTUM_KEY: self.own}

    def restore(self) -> None:
        """The trained values again, whatever loads did."""
        for key, tensor in self.all().items():
            tensor.copy_(self._trained[key])

    def wipe(self) -> None:
        """Forget the values, so that a load has something to do."""
        for tensor in self.all().values():
            tensor.zero_()

    def digests(self, tensors: dict[str, Tensor] | None = None) -> dict[str, str]:
        """xxh3-128 of each tensor's bytes; of the rank's own if None."""
        found = self.all() if tensors is None else tensors
        return {key: digest(host_bytes(tensor.detach().cpu())).hex() for key, tensor in found.items()}

    def note_digests(self, folder: str) -> None:
        """Write beside ``folder`` what this rank is about to save there."""
        _noted(folder, self.rank).write_text(json.dumps(self.digests()))

    def are_as_noted(self, folder: str, tensors: dict[str, Tensor] | None = None) -> bool:
        """Whether ``tensors`` (the rank's own if None) are those that this rank saved into ``folder``."""
        return bool(self.digests(tensors) == json.loads(_noted(folder, self.rank).read_text()))


def _noted(folder: str, rank: int) -> Path:
    return Path(f"{folder}.rank{rank}.json")


def current_device() -> torch.device:
    """The GPU that is set for this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
