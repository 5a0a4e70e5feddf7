"""The engine for any training loop: a plain dict of tensors and small values, saved and loaded whole."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from landfall.coord.base import Coordinator
from landfall.coord.solo import SoloCoordinator
from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.engine import load as engine_load
from landfall.engine import save as engine_save
from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST, Contents, TorchDist
from landfall.engine.latest import newest
from landfall.engine.session import Session
from landfall.engine.stage import Stager
from landfall.errors import CheckpointError, UsageError
from landfall.format import torch_dist
from landfall.format.manifest import Manifest
from landfall.format.shards import Box, Shard, whole
from landfall.format.unpickle import load_object
from landfall.store.local import LocalStore

VALUES = "landfall_values"
"""In common.pt: what is not a tensor."""
SEPARATOR = "."


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, step: int = 0) -> Manifest:
    """Save a (nested) dict of tensors and small values into the folder ``path``, and commit it.

    Every rank of the default process group calls it (without one, this process alone). A plain tensor is the
    same on all ranks and written by one of them; of a DTensor each rank writes what it holds. Values are
    rank 0's: numbers, texts, None, and lists, tuples and dicts of these. Raises SaveError on every rank if
    it is not committed; what was committed at ``path`` before is then still there.
    """
    session = _session()
    tensors, values = _flatten(state_dict)

    def contents() -> Contents:
        shards = [shard for key, tensor in tensors.items() if (shard := _shard(key, tensor)) is not None]
        common = torch_dist.object_bytes({VALUES: values}) if session.rank == 0 else b""
        return Contents(TorchDist(shards, [], common))

    return engine_save.save(contents, LocalStore(path), session, step=step)


def load(state_dict: dict[str, Any], path: str | os.PathLike[str]) -> int:
    """Fill ``state_dict`` in place from the checkpoint ``path``; returns the step that it was saved at.

    Tensors keep their place, dtype and device, and values are replaced. Only bytes that verify get in.
    Every rank may call it, or any of them alone: it loads into any layout. Raises CheckpointError if
    something that ``state_dict`` names is not there or has another shape, DamagedError for damage.
    """
    checkpoint = Checkpoint(LocalStore(path))
    tensors, values = _flatten(state_dict)
    shards = [shard for key, tensor in tensors.items() if (shard := _shard(key, tensor)) is not None]
    found = load_object(checkpoint.read_file(torch_dist.COMMON), checkpoint.place).get(VALUES, {})
    if missing := sorted(values.keys() - found.keys()):
        raise CheckpointError("The checkpoint lacks values", where=checkpoint.place, got=f"no {missing[:5]}")
    engine_load.load(shards, checkpoint, TORCH_DIST)
    for key in values:
        _put(state_dict, key, found[key])
    return checkpoint.manifest.step


def latest(path: str | os.PathLike[str]) -> Path:
    """The newest committed checkpoint at or below ``path`` that verifies; NoCheckpointError if there is none."""
    return newest(path).folder


def _flatten(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and values by dotted key; raises UsageError for keys that are no texts or not unique."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise UsageError(
                "Keys of a state dict have to be texts", got=repr(name), where=prefix or "top level"
            )
        key = prefix + name
        if isinstance(value, torch.Tensor):
            _add(tensors, key, value)
        elif isinstance(value, Mapping) and value:
            more_tensors, more_values = _flatten(value, key + SEPARATOR)
            for k, tensor in more_tensors.items():
                _add(tensors, k, tensor)
            for k, item in more_values.items():
                _add(values, k, item)
        else:
            _refuse_tensors_in(value, key)
            _add(values, key, value)
    return tensors, values


def _add(into: dict[str, Any], key: str, value: Any) -> None:
    if key in into:
        raise UsageError("Two entries of a state dict have one name", got=key, do="rename one of them")
    into[key] = value


def _refuse_tensors_in(value: Any, key: str) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor | Mapping):
                raise UsageError(
                    "Lists in a state dict may hold small values only",
                    where=key,
                    got=type(item).__name__,
                    do="use a dict, so that each tensor has a name",
                )


def _put(state: dict[str, Any], key: str, value: Any) -> None:
    for name in list(state):
        if name == key:
            state[name] = value
            return
        if key.startswith(name + SEPARATOR) and isinstance(state[name], dict):
            _put(state[name], key.removeprefix(name + SEPARATOR), value)
            return


def _shard(key: str, tensor: torch.Tensor) -> Shard | None:
    """What this rank holds of a tensor; None if that is nothing."""
    if (local := getattr(tensor, "to_local", None)) is not None and hasattr(tensor, "device_mesh"):
        return _dtensor_shard(key, tensor, local)
    ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    shape = tuple(tensor.shape)
    return Shard(key, shape, whole(shape), tensor.detach(), ranks)


def _dtensor_shard(key: str, tensor: Any, local: Callable[[], torch.Tensor]) -> Shard | None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    if not all(type(placement) in (Replicate, Split) for placement in placements):
        raise UsageError("A DTensor is placed in a way that can't be saved", where=key, got=str(placements))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if 0 in sizes:
        return None
    # The ranks that differ from this one only along mesh dimensions that replicate hold the same box.
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else slice(at, at + 1)
        for placement, at in zip(placements, coordinate, strict=True)
    )
    replicas = tuple(sorted(mesh.mesh[place].flatten().tolist()))
    return Shard(key, shape, Box(tuple(offsets), tuple(sizes)), local().detach(), replicas)


@functools.cache
def _session_of(is_distributed: bool) -> Session:
    coordinator: Coordinator = (
        TCPStoreCoordinator.from_process_group() if is_distributed else SoloCoordinator()
    )
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    return Session(coordinator, Stager(device))


def _session() -> Session:
    """One for all saves of this process, made by the first: every rank makes its own then."""
    return _session_of(dist.is_initialized() and dist.get_world_size() > 1)
