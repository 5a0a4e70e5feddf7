"""One rank's part of a save: what it writes, and whether there is room for it."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from dataclasses import dataclass

from landfall.engine.contents import SAFETENSORS, TORCH_DIST, Contents, TorchDist
from landfall.engine.export import connected, write_safetensors
from landfall.engine.protocol import Step, reached
from landfall.engine.pulse import Pulse
from landfall.engine.session import Session
from landfall.engine.stage import StagedPieces
from landfall.engine.write import SaveFiles
from landfall.format import torch_dist
from landfall.format.index import Index, ObjectRecord, TensorRecord, digest, file_name
from landfall.format.manifest import staged_name
from landfall.format.plan import my_share
from landfall.format.shards import Shard
from landfall.store.base import Store


@dataclass(frozen=True)
class Written:
    """What a rank wrote, when it is durable."""

    index: Index
    index_digest: str
    tensors_digest: str
    """The same for two saves if every byte of every tensor is; "" if there are no tensors."""


def write_part(contents: Contents, store: Store, session: Session, save_id: str, pulse: Pulse) -> Written:
    """Write this rank's share and its index; all of it is durable on return."""
    files = SaveFiles(store, pulse)
    tensors: dict[str, list[TensorRecord]] = {}
    objects: dict[str, list[ObjectRecord]] = {}
    with connected(contents.safetensors, session, save_id, pulse) as peers:
        try:
            check_room(contents, store, session.rank)
            if contents.torch_dist is not None:
                tensors[TORCH_DIST], objects[TORCH_DIST] = _write_torch_dist(
                    contents.torch_dist, files, session, save_id
                )
            if contents.safetensors is not None:
                tensors[SAFETENSORS] = write_safetensors(contents.safetensors, files, session, save_id, peers)
            if session.rank == 0:
                for name, data in contents.files.items():
                    files.put(staged_name(name, save_id), name, data)
            reached(Step.WRITTEN)
            pulse.advance(doing="waits until its data is on the disk")
            files.finish()
            reached(Step.DURABLE)
        finally:
            files.close()
    index = Index(save_id, session.rank, files.extents, tensors, objects)
    data = index.encode()
    store.put(file_name(save_id, session.rank, contents.index_folder), data)
    reached(Step.INDEXED)
    return Written(index, digest(data).hex(), files.tensors_digest)


def check_room(contents: Contents, store: Store, rank: int) -> None:
    """Refuse a save that can't fit, before a byte of it is written; raises OSError with the figures."""
    file_bytes = _file_bytes(contents, rank)
    room, needed = store.room(), sum(file_bytes.values())
    if rank == 0:
        needed = max(needed, contents.total_bytes)
    if room.free_bytes is not None and needed > room.free_bytes:
        what = f"{os.strerror(errno.ENOSPC)}: {needed:,} bytes are needed, {room.free_bytes:,} are free"
        raise OSError(errno.ENOSPC, what, store.describe())
    largest = max(file_bytes, key=lambda name: file_bytes[name], default=None)
    if room.file_bytes is not None and largest is not None and file_bytes[largest] > room.file_bytes:
        what = f"this process may write files of {room.file_bytes:,} bytes, and this one needs "
        what = f"{os.strerror(errno.EFBIG)}: {what}{file_bytes[largest]:,}"
        raise OSError(errno.EFBIG, what, store.describe(largest))


def _file_bytes(contents: Contents, rank: int) -> dict[str, int]:
    """For each file that this rank writes to, how long it makes it (but for headers and frames)."""
    sizes: dict[str, int] = defaultdict(int)
    if (part := contents.torch_dist) is not None:
        name = f"{part.folder}__{rank}_0{torch_dist.SUFFIX}"
        sizes[name] = sum(shard.num_bytes for shard in my_share(part.shards, rank, loads=part.loads))
        sizes[name] += sum(len(item.payload) for item in my_share(part.objects, rank))
    if contents.safetensors is not None:
        for shard in my_share(contents.safetensors.rows, rank, whole_tensors=True):
            name, _ = contents.safetensors.places[shard.key]
            sizes[name] += shard.num_bytes
    return sizes


def _write_torch_dist(
    part: TorchDist, files: SaveFiles, session: Session, save_id: str
) -> tuple[list[TensorRecord], list[ObjectRecord]]:
    """Records end to end in one file of this rank: tensors first, so that their digests are their own."""
    shards = my_share(part.shards, session.rank, loads=part.loads)
    objects = my_share(part.objects, session.rank)
    if session.rank == 0:
        common = part.folder + torch_dist.COMMON
        files.put(staged_name(common, save_id), common, part.common)
    if not shards and not objects:
        return [], []
    name = f"{part.folder}__{session.rank}_0.{save_id}{torch_dist.SUFFIX}"
    tensor_records, position = _write_tensors(shards, name, files, session)
    object_records = []
    writer = files.writer(name, name, position)
    for item in objects:
        object_records.append(ObjectRecord(item.key, name, position, len(item.payload)))
        writer.write(item.payload)
        position += len(item.payload)
    files.finish_extent(writer)
    return tensor_records, object_records


def _write_tensors(
    shards: list[Shard], name: str, files: SaveFiles, session: Session
) -> tuple[list[TensorRecord], int]:
    """The tensors of a torch_dist file, from its begin; their records, and where they end."""
    writer, position, records = files.writer(name, name, 0), 0, []
    pieces = StagedPieces(session.stager.pieces(shard.data for shard in shards))
    for shard in shards:
        dtype = shard.data.dtype
        head, tail = torch_dist.frame(shard.box.sizes, dtype)
        length = len(head) + shard.num_bytes + len(tail)
        records.append(
            TensorRecord(
                shard.key,
                torch_dist.dtype_name(dtype),
                shard.global_shape,
                shard.box,
                name,
                position + len(head),
                (position, length),
            )
        )
        writer.write(head)
        for piece in pieces.take(shard.num_bytes):
            writer.write(piece)
        writer.write(tail)
        position += length
    files.finish_extent(writer, of_tensors=True)
    return records, position
