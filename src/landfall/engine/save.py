"""Save a checkpoint: planned without a word, written by everyone, committed once.

Nothing here talks through torch.distributed, and nothing allocates on the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import msgspec

from landfall.engine.commit import commit, undo
from landfall.engine.contents import SAFETENSORS, TORCH_DIST, Contents, Safetensors, TorchDist
from landfall.engine.session import Session
from landfall.engine.write import ExtentWriter, SaveFiles
from landfall.errors import LandfallError, SaveError
from landfall.format import torch_dist
from landfall.format.hf_folder import INDEX_FILE
from landfall.format.index import Index, ObjectRecord, TensorRecord, digest, file_name
from landfall.format.manifest import Manifest, Writer, decode_manifest, staged_name
from landfall.format.plan import TableDigest, disagreements, my_share, table_digests
from landfall.store.base import Store


class Report(msgspec.Struct, frozen=True):
    """What a rank tells rank 0 when its part is durable, or why it is not."""

    rank: int
    step: int
    place: str
    error: str
    tables: list[TableDigest]
    index: str = ""
    index_digest: str = ""
    num_bytes: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 answers: the committed manifest's bytes, or why there is none."""

    error: str
    manifest: bytes = b""


def save(contents: Contents, store: Store, session: Session, *, step: int) -> Manifest:
    """Save ``contents`` into the folder ``store``; every rank calls it, in the same order as all its saves.

    On return on every rank the checkpoint is committed: durable, complete, and the only thing that a reader
    sees in the folder. On a :class:`~landfall.errors.SaveError` (raised on every rank) what was committed in
    the folder before is still there, whole, and the partial save is removed.
    """
    save_id = session.next_save_id()
    error, index = "", None
    try:
        with _as_save_error(session.rank, step, store):
            index = _write(contents, store, session, save_id)
    except SaveError as caught:
        error = str(caught)
    report = _report(contents, store, session.rank, step, error, index)
    outcome = _agree(report, contents, store, session, save_id)
    if outcome.error:
        undo(store, save_id, session.rank)
        raise SaveError(outcome.error)
    return decode_manifest(outcome.manifest, store.describe())


def _write(contents: Contents, store: Store, session: Session, save_id: str) -> tuple[Index, bytes]:
    """Write this rank's share and its index; all of it is durable on return."""
    files = SaveFiles(store)
    tensors: dict[str, list[TensorRecord]] = {}
    objects: dict[str, list[ObjectRecord]] = {}
    try:
        if contents.torch_dist is not None:
            tensors[TORCH_DIST], objects[TORCH_DIST] = _write_torch_dist(
                contents.torch_dist, files, session, save_id
            )
        if contents.safetensors is not None:
            tensors[SAFETENSORS] = _write_safetensors(contents.safetensors, files, session, save_id)
        if session.rank == 0:
            for name, data in contents.files.items():
                files.put(staged_name(name, save_id), name, data)
        files.finish()
    finally:
        files.close()
    index = Index(save_id, session.rank, files.extents, tensors, objects)
    data = index.encode()
    store.put(file_name(save_id, session.rank, contents.index_folder), data)
    return index, data


def _write_torch_dist(
    part: TorchDist, files: SaveFiles, session: Session, save_id: str
) -> tuple[list[TensorRecord], list[ObjectRecord]]:
    """Records end to end in one file of this rank: objects first, then tensors."""
    shards = my_share(part.shards, session.rank)
    objects = my_share(part.objects, session.rank)
    if session.rank == 0:
        files.put(
            staged_name(part.folder + torch_dist.COMMON, save_id),
            part.folder + torch_dist.COMMON,
            part.common,
        )
    if not shards and not objects:
        return [], []
    name = f"{part.folder}__{session.rank}_0.{save_id}{torch_dist.SUFFIX}"
    writer = ExtentWriter(files.file(name), name, 0)
    position, object_records, tensor_records = 0, [], []
    for item in objects:
        object_records.append(ObjectRecord(item.key, name, position, len(item.payload)))
        writer.write(item.payload)
        position += len(item.payload)
    pieces = _Pieces(session.stager.pieces(shard.data for shard in shards))
    for shard in shards:
        head, tail = torch_dist.frame(shard.box.sizes, shard.data.dtype)
        length = len(head) + shard.num_bytes + len(tail)
        tensor_records.append(
            TensorRecord(
                shard.key,
                torch_dist.dtype_name(shard.data.dtype),
                shard.global_shape,
                shard.box,
                name,
                position + len(head),
                (position, length),
            )
        )
        writer.write(head)
        pieces.copy(shard.num_bytes, writer)
        writer.write(tail)
        position += length
    files.extents.append(writer.finish())
    return tensor_records, object_records


def _write_safetensors(
    part: Safetensors, files: SaveFiles, session: Session, save_id: str
) -> list[TensorRecord]:
    """Each box straight to its place in the file that the plan gives it; rank 0 writes headers and index."""
    if session.rank == 0:
        for planned in part.plan.files:
            files.put(staged_name(planned.name, save_id), planned.name, planned.header)
        if part.plan.index is not None:
            files.put(staged_name(INDEX_FILE, save_id), INDEX_FILE, part.plan.index)
    shards = sorted(my_share(part.shards, session.rank, whole_tensors=True), key=part.place)
    pieces = _Pieces(session.stager.pieces(shard.data for shard in shards))
    records = []
    for shard in shards:
        name, offset = part.place(shard)
        writer = ExtentWriter(files.file(staged_name(name, save_id)), name, offset)
        pieces.copy(shard.num_bytes, writer)
        files.extents.append(writer.finish())
        dtype = torch_dist.dtype_name(shard.data.dtype)
        records.append(TensorRecord(shard.key, dtype, shard.global_shape, shard.box, name, offset))
    return records


class _Pieces:
    """The stager's pieces, dealt out tensor by tensor. (A piece never holds bytes of two tensors.)"""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces

    def copy(self, num_bytes: int, writer: ExtentWriter) -> None:
        while num_bytes:
            piece = next(self._pieces)
            writer.write(piece)
            num_bytes -= len(piece)


def _report(
    contents: Contents, store: Store, rank: int, step: int, error: str, written: tuple[Index, bytes] | None
) -> Report:
    place = store.describe()
    if written is None:
        return Report(rank, step, place, error, [])
    index, data = written
    name = file_name(index.save_id, rank, contents.index_folder)
    num_bytes = sum(extent.length for extent in index.extents)
    tables = table_digests(contents.shards())
    return Report(rank, step, place, "", tables, name, digest(data).hex(), num_bytes)


def _agree(report: Report, contents: Contents, store: Store, session: Session, save_id: str) -> Outcome:
    """Everyone reports to rank 0; rank 0 commits and answers; the answer is the same on every rank."""
    coordinator = session.coordinator
    reports_key, outcome_key = f"save/{save_id}/report", f"save/{save_id}/outcome"
    session.forget_old_messages([reports_key, outcome_key])
    coordinator.post(reports_key, msgspec.msgpack.encode(report))
    answer: bytes | None = None
    if report.rank == 0:
        outcome = _decide(contents, store, session, save_id, reports_key)
        answer = msgspec.msgpack.encode(outcome)
    try:
        # Rank 0 may need its whole deadline to find out who is missing before it can answer.
        answer = coordinator.from_rank0(outcome_key, answer, 2 * session.deadline_s)
    except LandfallError as error:
        raise SaveError(
            "The save was not committed as far as this rank can tell",
            where=f"rank {report.rank}, step {report.step}, {report.place}",
            got=str(error),
            do="see what rank 0 says; the checkpoint that was committed before is untouched",
        ) from error
    return msgspec.msgpack.decode(answer, type=Outcome)


def _decide(contents: Contents, store: Store, session: Session, save_id: str, reports_key: str) -> Outcome:
    """Rank 0: commit if every rank's part is durable and all tell the same story."""
    try:
        everyone = range(session.coordinator.world_size)
        messages = session.coordinator.collect(reports_key, everyone, session.deadline_s)
        reports = {rank: msgspec.msgpack.decode(data, type=Report) for rank, data in messages.items()}
        if error := _find_fault(reports):
            return Outcome(error)
        writers = [Writer(r.rank, r.index, r.index_digest, r.num_bytes) for r in reports.values()]
        with _as_save_error(0, reports[0].step, store):
            manifest = commit(contents, store, save_id, writers, step=reports[0].step)
        return Outcome("", manifest.encode())
    except LandfallError as error:
        return Outcome(str(error))


def _find_fault(reports: dict[int, Report]) -> str:
    """Why these reports can't be committed; empty when they can."""
    failed = [report for report in reports.values() if report.error]
    if failed:
        others = f"\n  also failed: ranks {[report.rank for report in failed[1:]]}" if failed[1:] else ""
        return failed[0].error + others
    first = reports[0]
    for report in reports.values():
        if (report.step, report.place) != (first.step, first.place):
            return (
                "Ranks save different things\n"
                f"  where: rank {report.rank} saves step {report.step} into {report.place}\n"
                f"  expected: as rank 0, step {first.step} into {first.place}"
            )
    if groups := disagreements({rank: report.tables for rank, report in reports.items()}):
        return (
            "Ranks that should hold the same tensors hold different ones\n"
            f"  where: step {first.step}, ranks {groups[0]}\n"
            "  expected: the same names, shapes and dtypes on all of them\n"
            "  do: check that these ranks built the same model"
        )
    return ""


@contextlib.contextmanager
def _as_save_error(rank: int, step: int, store: Store) -> Iterator[None]:
    """Turn what goes wrong while writing into a SaveError that says who, what and where."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        place = error.filename or store.describe()
        raise SaveError(
            "The checkpoint could not be written",
            where=f"rank {rank}, step {step}, {place}",
            got=f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror or error}{_free(place)}",
            do="make room or mend the file system; the checkpoint that was committed before is untouched",
        ) from error
    except Exception as error:
        where = f"rank {rank}, step {step}, {store.describe()}"
        raise SaveError("The save failed", where=where, got=f"{type(error).__name__}: {error}") from error


def _free(place: str) -> str:
    with contextlib.suppress(OSError):
        stats = os.statvfs(os.path.dirname(place) or place)
        return f" ({stats.f_bavail * stats.f_frsize:,} bytes free there)"
    return ""
