"""The four ways to save and to load the same tensors. Nothing is patched: each is used as its users do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from landfall.coord.base import Coordinator
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.load import load
from landfall.engine.save import save
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.format.manifest import NAME as MANIFEST
from landfall.format.shards import Box, Shard, whole
from landfall.format.torch_dist import METADATA, object_bytes
from landfall.repro.cases import Writer
from landfall.repro.tensors import MOMENTUM_KEY, Tensors, current_device
from landfall.store.local import LocalStore

COMMON = {"iteration": 10000}
DEADLINE_S = 120.0


class Saver(ABC):
    """Made on all ranks before the card is full; ``save`` and ``load`` are called on all of them together."""

    last_file = METADATA
    """The file that a save writes last: where it is, there is a checkpoint."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    @abstractmethod
    def save(self, folder: str) -> None:
        """Save the tensors into ``folder``, which exists and is empty."""

    @abstractmethod
    def load(self, folder: str) -> dict[str, Tensor]:
        """Load what was saved; returns the loaded tensors of this rank."""

    def has(self, folder: str) -> bool:
        """Whether a save into ``folder`` was completed."""
        return Path(folder, self.last_file).exists()


def make_saver(writer: Writer, tensors: Tensors, coordinator: Coordinator, group: dist.ProcessGroup) -> Saver:
    """Every rank calls it for the same writers in the same order: one of them makes a process group."""
    if writer == "stock":
        return Stock(tensors, group)
    if writer == "landfall":
        return Landfall(tensors, coordinator)
    return TorchDCP(tensors, dist.new_group(backend="gloo") if writer == "dcp_gloo" else None)


class Stock(Saver):
    """megatron-core's dist_checkpointing, parallel over ``group`` as Megatron-LM and ms-swift save."""

    def __init__(self, tensors: Tensors, group: dist.ProcessGroup) -> None:
        super().__init__(tensors)
        self.group = group

    def save(self, folder: str) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import fully_parallel

        strategy = get_default_save_sharded_strategy()
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, self.group)
        dist_checkpointing.save({**self._sharded(), "common": dict(COMMON)}, folder, strategy)

    def load(self, folder: str) -> dict[str, Tensor]:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._sharded(), folder)
        return {key: loaded[key] for key in self.tensors.all()}

    def _sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        mine = self.tensors
        sharded = {
            key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=mine.rank)
            for key, tensor in mine.replicated.items()
        }
        own = ShardedTensor.from_rank_offsets(MOMENTUM_KEY, mine.own, (0, mine.rank, mine.size))
        return {**sharded, MOMENTUM_KEY: own}


class TorchDCP(Saver):
    """torch.distributed.checkpoint on DTensors; ``group`` None is the default group."""

    def __init__(self, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
        super().__init__(tensors)
        self.group = group
        self._state = self._distributed()

    def save(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(self._state), checkpoint_id=folder, process_group=self.group)

    def load(self, folder: str) -> dict[str, Tensor]:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(self._state), checkpoint_id=folder, process_group=self.group)  # in place
        return self.tensors.all()

    def _distributed(self) -> dict[str, Any]:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        everyone = dist.group.WORLD
        assert everyone is not None
        mesh = DeviceMesh.from_group(everyone, current_device().type)
        state = {
            key: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
            for key, tensor in self.tensors.replicated.items()
        }
        own = DTensor.from_local(self.tensors.own, mesh, [Shard(0)], run_check=False)
        return {**state, MOMENTUM_KEY: own}


class Landfall(Saver):
    """Our engine. Its buffers are made here, before the card is full, as ``landfall sft`` makes them."""

    last_file = MANIFEST

    def __init__(self, tensors: Tensors, coordinator: Coordinator) -> None:
        super().__init__(tensors)
        self.session = Session(coordinator, Stager(current_device()), deadline_s=DEADLINE_S)

    def save(self, folder: str) -> None:
        contents = Contents(TorchDist(self._shards(), [], object_bytes(dict(COMMON))))
        save(contents, LocalStore(folder), self.session, step=COMMON["iteration"])

    def load(self, folder: str) -> dict[str, Tensor]:
        load(self._shards(), Checkpoint(LocalStore(folder)), TORCH_DIST)  # in place
        return self.tensors.all()

    def _shards(self) -> list[Shard]:
        mine = self.tensors
        everyone = tuple(range(mine.size))
        shards = [
            Shard(key, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor, everyone)
            for key, tensor in mine.replicated.items()
        ]
        num_rows = mine.own.shape[0]
        box = Box((mine.rank * num_rows, 0), tuple(mine.own.shape))
        return [*shards, Shard(MOMENTUM_KEY, mine.own_shape, box, mine.own, (mine.rank,))]
