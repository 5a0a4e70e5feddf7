"""The whole table of flags and environment variables: one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from landfall.sft.flags import spec
from landfall.sft.flags.data import DataFlags
from landfall.sft.flags.environment import EnvironmentFlags
from landfall.sft.flags.model import ModelFlags
from landfall.sft.flags.output import OutputFlags, size_bytes
from landfall.sft.flags.training import TrainingFlags


@dataclass(frozen=True)
class SftConfig(EnvironmentFlags, OutputFlags, TrainingFlags, DataFlags, ModelFlags):
    """All values of a run, under the names that ms-swift 3.12 gives the flags."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nproc_per_node * self.nnodes

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        sizes = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return sizes[0] * sizes[1] * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that are trained side by side."""
        return self.world_size // self.model_parallel_size

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that a rank computes in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def max_shard_size_bytes(self) -> int:
        """The largest safetensors file."""
        size = size_bytes(self.max_shard_size)
        assert size is not None
        return size


@cache
def entries() -> tuple[spec.Entry, ...]:
    """What can be set: the fields of SftConfig, the flags first and the environment last."""
    return tuple(sorted(spec.entries_of(SftConfig), key=lambda entry: bool(entry.flag.env)))
