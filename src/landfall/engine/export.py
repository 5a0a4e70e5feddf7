"""Write weights as Hugging Face's files: several ranks into the same file, each byte from one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from landfall.engine.columns import ColumnExchange, my_matrices
from landfall.engine.contents import Safetensors
from landfall.engine.peers import ABSENT, Peers
from landfall.engine.pulse import Pulse
from landfall.engine.session import Session
from landfall.engine.stage import StagedPieces, Stager
from landfall.engine.write import SaveFiles
from landfall.format.hf_folder import INDEX_FILE
from landfall.format.index import TensorRecord
from landfall.format.manifest import staged_name
from landfall.format.plan import my_share
from landfall.format.torch_dist import dtype_name


@contextlib.contextmanager
def connected(
    part: Safetensors | None, session: Session, save_id: str, pulse: Pulse
) -> Iterator[Peers | None]:
    """Connections to the ranks with which this one shares matrices; None if there are none.

    Made before anything of a save can fail: a rank that fails then hangs up, and its peers fail at once
    instead of waiting for it.
    """
    group = next((group for group in part.groups if session.rank in group), ()) if part is not None else ()
    if part is None or len(group) < 2 or not part.columns:
        yield None
        return
    key = _key(save_id)
    session.stale_keys.append(key)
    peers = Peers(session.coordinator, group, key, session.deadline_s, pulse.advance)
    try:
        yield peers
    finally:
        peers.close()


def stay_away(session: Session, save_id: str) -> None:
    """Tell the ranks that would meet this one that it does not come."""
    session.stale_keys.append(_key(save_id))
    session.coordinator.post(_key(save_id), ABSENT)


def _key(save_id: str) -> str:
    return f"save/{save_id}/peers"


def write_safetensors(
    part: Safetensors, files: SaveFiles, session: Session, save_id: str, peers: Peers | None
) -> list[TensorRecord]:
    """Each box straight to its place in the file that the plan gives it; rank 0 writes headers and index."""
    if session.rank == 0:
        for planned in part.plan.files:
            files.put(staged_name(planned.name, save_id), planned.name, planned.header)
        if part.plan.index is not None:
            files.put(staged_name(INDEX_FILE, save_id), INDEX_FILE, part.plan.index)
    records = _write_rows(part, files, session, save_id)
    if part.columns:
        if peers is None:
            raise ValueError("columns can only be written by ranks that are connected")
        records += _write_columns(part, files, session, save_id, peers)
    return records


def _write_rows(part: Safetensors, files: SaveFiles, session: Session, save_id: str) -> list[TensorRecord]:
    placed = []
    for shard in my_share(part.rows, session.rank, whole_tensors=True):
        row, num_rows = (shard.box.offsets[0], shard.box.sizes[0]) if shard.box.sizes else (0, 1)
        placed.append((part.place(shard.key, row, shard.num_bytes // max(num_rows, 1)), shard))
    placed.sort(key=lambda item: item[0])
    pieces = StagedPieces(session.stager.pieces(shard.data for _, shard in placed))
    records = []
    for (name, offset), shard in placed:
        writer = files.writer(staged_name(name, save_id), name, offset)
        for piece in pieces.take(shard.num_bytes):
            writer.write(piece)
        files.finish_extent(writer, of_tensors=True)
        dtype = dtype_name(shard.data.dtype)
        records.append(TensorRecord(shard.key, dtype, shard.global_shape, shard.box, name, offset))
    return records


def _write_columns(
    part: Safetensors, files: SaveFiles, session: Session, save_id: str, peers: Peers
) -> list[TensorRecord]:
    matrices = my_matrices(part.columns, part.groups, session.rank)
    member = peers.group.index(session.rank)
    sending = session.sending_stager or Stager(session.stager.device)
    exchange = ColumnExchange(matrices, peers, session.stager, sending)
    records = []
    for matrix in matrices:
        shard, box = matrix.shard, matrix.box(member)
        name, offset = part.place(shard.key, box.offsets[0], matrix.row_bytes)
        writer = files.writer(staged_name(name, save_id), name, offset)
        exchange.write(matrix, writer)
        if box.num_elements:
            files.finish_extent(writer, of_tensors=True)
            dtype = dtype_name(shard.data.dtype)
            records.append(TensorRecord(shard.key, dtype, shard.global_shape, box, name, offset))
    exchange.finish()
    return records
