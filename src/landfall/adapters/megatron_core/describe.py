"""A megatron-core model and its distributed optimizer as shards, where they lie, without communication.

megatron-core itself saves the optimizer by gathering it into whole parameters (``fully_reshardable``). Here
each data-parallel rank describes the flat range that it owns as boxes of the same model-space tensors, under
the same keys, so the files are the same to a reader and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from landfall.adapters.megatron_core.replicas import Ranks, Replicas, find_replicas
from landfall.format import torch_dist
from landfall.format.shards import Box, ObjectShard, Shard, boxes_of_flat_range

OPTIMIZER_PREFIX = "optimizer.state"
STATES = ("param", "exp_avg", "exp_avg_sq")
STATE_BYTES = 4 * len(STATES)
"""Of one element of a parameter: main parameters and moments are float32."""
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""What tells stock megatron-core how our checkpoints are laid out (its ``content_metadata``)."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that is one box of a tensor in the checkpoint.

    ``start`` is where it begins in the flattened local parameter; ``shape`` is its local shape with the axes
    that the checkpoint's tensor has in front (one per stacked layer).
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    num_stacked: int
    """How many leading axes the checkpoint's tensor has that the parameter has not."""
    is_split: bool
    """Whether tensor-parallel ranks hold different parts; all of them hold the same otherwise."""
    is_main: bool
    """Whether this pipeline stage saves it: of a tied embedding's two copies only one is saved."""
    is_padded: bool
    """Whether the tensor has rows at its end that only depend on the layout (the vocabulary's padding)."""


@dataclass(frozen=True)
class DescribedParameter:
    parameter: torch.Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ModelDescription:
    """What :func:`describe_model` found, the basis for model, optimizer, saving and loading."""

    parameters: list[DescribedParameter]
    objects: list[ObjectShard]
    replicas: Replicas

    @property
    def padded_keys(self) -> set[str]:
        """The keys, in the model and in the optimizer, of tensors that have padding rows in some layouts."""
        keys = {p.key for described in self.parameters for p in described.pieces if p.is_padded}
        return keys | {f"{OPTIMIZER_PREFIX}.{state}.{key}" for state in STATES for key in keys}


def describe_model(model: Any) -> ModelDescription:
    """Describe a megatron-core module (not wrapped in DDP). Any rank, alone; nothing is copied."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    replicas = find_replicas()
    state = model.sharded_state_dict(metadata={**METADATA, "dp_cp_group": group})
    parameters, objects = [], []
    for entry in nested_values(state):
        if isinstance(entry, ShardedObject):
            if _is_main(entry.replica_id):
                payload = torch_dist.object_bytes([entry.data])
                objects.append(ObjectShard(entry.unique_key, payload, replicas.data))
        else:
            tensors = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            pieces = tuple(_piece(tensor, entry.data, replicas) for tensor in nested_values(tensors))
            parameters.append(DescribedParameter(entry.data, pieces))
    return ModelDescription(parameters, objects, replicas)


def model_shards(description: ModelDescription, *, to_save: bool) -> list[Shard]:
    """The model's tensors: to save, those that this stage and its replicas write; to load, all of them."""
    replicas = description.replicas
    return [
        _shard(piece, described.parameter, replicas.data if piece.is_split else replicas.stage)
        for described in description.parameters
        for piece in described.pieces
        if piece.is_main or not to_save
    ]


def optimizer_shards(optimizer: Any, description: ModelDescription, *, to_save: bool) -> list[Shard]:
    """This rank's slice of main parameters and Adam moments, as boxes of the model-space tensors.

    Its state must exist (see sft.optim); views, not copies. Nobody else holds these boxes, but for what
    tensor parallelism leaves whole: those ranks split their buffers alike.
    """
    pieces = {described.parameter: described.pieces for described in description.parameters}
    alone = (torch.distributed.get_rank(),)
    shards: list[Shard] = []
    for parameter, start, state in _owned_ranges(optimizer):
        for name in STATES:
            flat = state[name].detach().view(-1)
            for piece in pieces[parameter]:
                if piece.is_main or not to_save:
                    key = f"{OPTIMIZER_PREFIX}.{name}.{piece.key}"
                    replicas = alone if piece.is_split else description.replicas.tensor
                    shards.extend(_flat_shards(piece, key, flat, start, replicas))
    return shards


def optimizer_loads(optimizer: Any, description: ModelDescription) -> dict[int, int]:
    """The bytes of optimizer state that each data-parallel rank of this slice of the model writes, as all of
    them know it from the layout of their buffers: they own equal parts of it, but not of what they share."""
    pieces = {described.parameter: described.pieces[0] for described in description.parameters}
    ranks = description.replicas.data
    loads = dict.fromkeys(ranks, 0)
    for inner in distributed_optimizers(optimizer):
        for buffer in inner.buffers:
            for parameter, (start, end, index) in buffer.param_index_map.items():
                bucket, piece = buffer.buckets[index], pieces[parameter]
                share = bucket.grad_data.numel() // len(ranks)
                copies = 1 if piece.is_split else len(description.replicas.tensor)
                for number, rank in enumerate(ranks):
                    first = bucket.offset + number * share
                    owned = max(0, min(end, first + share) - max(start, first))
                    if piece.is_main:
                        loads[rank] += owned * STATE_BYTES // copies
    return loads


def optimizer_common(optimizer: Any) -> dict[Any, Any]:
    """The optimizer's state that is no tensor, as stock megatron-core keeps it in common.pt."""
    states = [
        {**inner.state_dict(), "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}
        for inner in distributed_optimizers(optimizer)
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def restore_optimizer_common(optimizer: Any, saved: dict[Any, Any]) -> None:
    """Put back the step count that :func:`optimizer_common` (or stock megatron-core) saved.

    Nothing else of it: rates, betas and decay are what this run's flags say, and the tensors are loaded apart.
    """
    states = [saved] if "optimizer" in saved else list(saved.values())
    groups = [group for state in states for group in state["optimizer"]["param_groups"]]
    step = max((int(group["step"]) for group in groups if group.get("step") is not None), default=0)
    for inner in distributed_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["step"] = step


def distributed_optimizers(optimizer: Any) -> list[DistributedOptimizer]:
    """The distributed optimizers in a (possibly chained) megatron optimizer that own parameters."""
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in found if not getattr(inner, "is_stub_optimizer", False)]


def _owned_ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
    """(model parameter, first flat element owned, main parameter and moments) for all that this rank owns."""
    for inner in distributed_optimizers(optimizer):
        for buffer in inner.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        state = inner._get_main_param_and_optimizer_states(parameter)
                        yield parameter, ranges["param"].start, state


def _flat_shards(piece: Piece, key: str, flat: torch.Tensor, start: int, replicas: Ranks) -> Iterator[Shard]:
    """The part of a flat range [start, start + len) of a parameter that lies in ``piece``, as boxes."""
    length = math.prod(piece.shape)
    begin = max(start, piece.start) - piece.start
    end = min(start + flat.numel(), piece.start + length) - piece.start
    position = begin + piece.start - start
    for box in boxes_of_flat_range(piece.shape, begin, end):
        data = flat[position : position + box.num_elements].view(box.sizes)
        position += box.num_elements
        offsets = tuple(a + b for a, b in zip(piece.offsets, box.offsets, strict=True))
        yield Shard(key, piece.global_shape, Box(offsets, box.sizes), data, replicas)


def _shard(piece: Piece, parameter: torch.Tensor, replicas: Ranks) -> Shard:
    data = piece_of(parameter, piece)
    return Shard(piece.key, piece.global_shape, Box(piece.offsets, piece.shape), data, replicas)


def piece_of(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a parameter that a piece is, as a view of ``piece.shape``."""
    end = piece.start + math.prod(piece.shape)
    return parameter.detach().view(-1)[piece.start : end].view(piece.shape)


def _piece(tensor: ShardedTensor, parameter: torch.Tensor, replicas: Replicas) -> Piece:
    data = tensor.data
    if not (data.is_contiguous() and parameter.is_contiguous()):
        raise ValueError(f"{tensor.key}: only contiguous parts of parameters can be saved in place")
    is_tied = bool(getattr(parameter, "shared_embedding", False))
    return Piece(
        key=tensor.key,
        global_shape=tuple(tensor.global_shape),
        offsets=tuple(tensor.global_offset),
        shape=(1,) * tensor.prepend_axis_num + tuple(data.shape),
        start=int(data.storage_offset() - parameter.storage_offset()),
        num_stacked=tensor.prepend_axis_num,
        is_split=bool(getattr(parameter, "tensor_model_parallel", False)),
        is_main=not (is_tied and replicas.is_first_of_two),
        is_padded=bool(tensor.allow_shape_mismatch),
    )


def _is_main(replica_id: int | tuple[int, ...]) -> bool:
    """Whether a replica is the first in all but the data-parallel dimension, which comes last."""
    return isinstance(replica_id, int) or not any(replica_id[:-1])
