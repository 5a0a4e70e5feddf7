"""The random number states of a rank, in the form in which Megatron's training keeps them."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch
from megatron.core import parallel_state, tensor_parallel

from landfall.format import torch_dist
from landfall.format.shards import ObjectShard


def object_key(name: str) -> str:
    """The key of this rank's states in a torch_dist checkpoint: one for each tensor and pipeline position."""
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    at = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return f"{name}/shard_{at[0]}.{at[1]}_{pp}.{tp}"


def object_shards(name: str, replicas: tuple[int, ...]) -> list[ObjectShard]:
    """This rank's states, to save; data-parallel ranks draw the same numbers and share them."""
    return [ObjectShard(object_key(name), torch_dist.object_bytes([[capture()]]), replicas)]


def capture() -> dict[str, Any]:
    """All states as plain values and CPU tensors, so that a reader needs no unsafe unpickling."""
    kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
    states: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (kind, keys.tolist(), position, has_gauss, gauss),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        states["cuda_rng_state"] = torch.cuda.get_rng_state()
    return states


def restore(saved: Any) -> None:
    """Put back what :func:`capture` (or Megatron's training) saved."""
    while isinstance(saved, list):
        saved = saved[0]
    random.setstate(_tuples(saved["random_rng_state"]))
    numpy.random.set_state(saved["np_rng_state"])
    torch.set_rng_state(saved["torch_rng_state"])
    if torch.cuda.is_available() and "cuda_rng_state" in saved:
        torch.cuda.set_rng_state(saved["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(saved["rng_tracker_states"])


def _tuples(state: Any) -> Any:
    return tuple(_tuples(part) for part in state) if isinstance(state, list | tuple) else state
