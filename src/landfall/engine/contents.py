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
    otherwise it ends with a slash.
    """

    shards: list[Shard]
    objects: list[ObjectShard] = field(default_factory=list)
    common: bytes = b""
    folder: str = ""


@dataclass(frozen=True)
class Safetensors:
    """Weights as Hugging Face reads them. ``plan`` is the same on every rank; keys are its names."""

    shards: list[Shard]
    plan: ExportPlan

    @cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """Tensor name -> its file and where its bytes begin there."""
        return {
            name: (file.name, entry.start) for file in self.plan.files for name, entry in file.entries.items()
        }

    def place(self, shard: Shard) -> tuple[str, int]:
        """File and offset of a row block; raises ValueError for a box that is not whole rows."""
        if shard.box.sizes[1:] != shard.global_shape[1:]:
            raise ValueError(f"{shard.key}: only whole rows can be written in place, not {shard.box}")
        file, start = self.places[shard.key]
        row_bytes = shard.num_bytes // shard.box.sizes[0] if shard.box.sizes and shard.box.sizes[0] else 0
        return file, start + (shard.box.offsets[0] * row_bytes if shard.box.offsets else 0)


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

    def shards(self) -> list[Shard]:
        """Every tensor box of every format, to compare the ranks' tables."""
        parts = (self.torch_dist, self.safetensors)
        return [shard for part in parts if part is not None for shard in part.shards]
