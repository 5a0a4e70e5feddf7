"""What one rank brings to a save: its part of each format in the checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from landfall.format.hf_folder import ExportPlan
from landfall.format.shards import ObjectShard, Shard

TORCH_DIST = "torch_dist"
SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class TorchDist:
    """A checkpoint that stock megatron-core and torch DCP read.

    ``common`` is the bytes of common.pt, used on rank 0; "" as ``folder`` is the checkpoint folder itself,
    otherwise it ends with a slash. ``loads`` are the bytes that the members of one replica set have to write
    anyway, as all of them know them: what they share is shared out so that it evens that out.
    """

    shards: list[Shard]
    objects: list[ObjectShard] = field(default_factory=list)
    common: bytes = b""
    folder: str = ""
    loads: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Safetensors:
    """Weights as Hugging Face reads them. ``plan`` is the same on every rank; keys are its names.

    A shard is whole rows of its tensor, or one column of a matrix that the ranks of each of ``groups`` hold
    together, in the order of the columns (see engine.columns).
    """

    shards: list[Shard]
    plan: ExportPlan
    groups: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """Tensor name -> its file and where its bytes begin there."""
        return {
            name: (file.name, entry.start) for file in self.plan.files for name, entry in file.entries.items()
        }

    @property
    def rows(self) -> list[Shard]:
        """The shards that can be written in place."""
        return [shard for shard in self.shards if shard.box.sizes[1:] == shard.global_shape[1:]]

    @property
    def columns(self) -> list[Shard]:
        """The shards that have to be put together with those of other ranks."""
        return [shard for shard in self.shards if shard.box.sizes[1:] != shard.global_shape[1:]]

    def place(self, key: str, row: int, row_bytes: int) -> tuple[str, int]:
        """File and offset where a row of a tensor begins."""
        file, start = self.places[key]
        return file, start + row * row_bytes


@dataclass(frozen=True)
class Contents:
    """All that is saved in one commit.

    ``files`` are small whole files that rank 0 writes, by the name that they get in the folder;
    ``index_folder`` is where every rank's index lies (beside the data). ``notes`` go into the manifest.
    """

    torch_dist: TorchDist | None = None
    safetensors: Safetensors | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    index_folder: str = ""
    notes: dict[str, object] = field(default_factory=dict)
    total_bytes: int = 0
    """About what all ranks together will write, for the check that it fits; 0 if nobody knows."""

    def shards(self) -> list[Shard]:
        """Every tensor box of every format, to compare the ranks' tables."""
        parts = (self.torch_dist, self.safetensors)
        return [shard for part in parts if part is not None for shard in part.shards]
