"""Which ranks hold the same as this one: known from megatron-core's process groups, without a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Replicas:
    """Global ranks, each tuple in rising order and with this rank among them."""

    data: Ranks
    """Hold the same slice of the model: data- and context-parallel ranks."""
    tensor: Ranks
    """Hold the other tensor-parallel slices of the same stage and the same data, in the order of slices."""
    stage: Ranks
    """All ranks of this pipeline stage; what tensor parallelism leaves whole is the same on all of them."""
    is_first_of_two: bool
    """Whether this stage's copy of a tied embedding is the one that is not saved: the last stage has another,
    and the first stage has the vision tower to save."""

    @property
    def tensor_groups(self) -> tuple[Ranks, ...]:
        """``tensor`` of every rank of the stage: tensor-parallel ranks follow one another."""
        size = len(self.tensor)
        return tuple(self.stage[start : start + size] for start in range(0, len(self.stage), size))


def find_replicas() -> Replicas:
    """Of this rank. Raises ValueError if tensor-parallel ranks are not numbered one after the other."""
    found = Replicas(
        data=_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        tensor=_ranks(parallel_state.get_tensor_model_parallel_group()),
        stage=_ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        is_first_of_two=parallel_state.is_pipeline_first_stage()
        and parallel_state.get_pipeline_model_parallel_world_size() > 1,
    )
    if found.tensor not in found.tensor_groups:
        raise ValueError(f"tensor-parallel ranks {found.tensor} don't follow one another in {found.stage}")
    return found


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group)))
