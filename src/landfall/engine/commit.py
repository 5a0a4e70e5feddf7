"""Rank 0's part of a save: check that it is whole, publish, commit, clear away what it replaces."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from datetime import datetime, timezone

from landfall import __version__
from landfall.engine.contents import SAFETENSORS, TORCH_DIST, Contents
from landfall.engine.protocol import Step, reached
from landfall.engine.write import SaveFiles
from landfall.errors import CheckpointError, RefusedError, SaveError
from landfall.format import torch_dist
from landfall.format.cover import find_faults
from landfall.format.index import Index, ObjectRecord, TensorRecord, decode_index, digest
from landfall.format.manifest import LIMIT_BYTES, NAME, Manifest, Writer, decode_manifest, staged_name
from landfall.store.base import TEMPORARY, Store

_SAVE_ID = re.compile(r"\.(lf[a-z0-9]+-\d+)(\.distcp|\.index)?$")
"""Every file that is not yet published, or never will be, carries its save_id here."""


def commit(
    contents: Contents,
    store: Store,
    save_id: str,
    writers: list[Writer],
    *,
    step: int,
    stale_since: int | None = None,
) -> Manifest:
    """Make a save that every rank has written the committed content of its folder.

    The steps are in this order for the sake of a kill between any two: everything durable, then published
    under the names that stock readers know, then committed, and only then is anything older removed.
    """
    indexes = [_read_index(store, writer) for writer in writers]
    _check_whole(contents, indexes, store, step)
    metadata, metadata_writer = _write_metadata(contents, store, save_id, indexes)
    indexes.append(metadata)
    manifest = Manifest(
        save_id=save_id,
        step=step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=len(writers),
        writers=[*writers, metadata_writer],
        published=sorted(
            {extent.file for index in indexes for extent in index.extents if _is_fixed(extent.file)}
        ),
        content=_content(contents, indexes)
        | ({} if stale_since is None else {"unchanged_since": stale_since}),
        landfall=__version__,
    )
    before = read_committed(store)
    store.put(staged_name(NAME, save_id), manifest.encode())  # so that a later save knows what to clear
    reached(Step.INTENDED)
    _publish(store, manifest, before)
    store.put(NAME, manifest.encode())  # the commit
    reached(Step.COMMITTED)
    _clear(store, manifest)
    return manifest


def read_committed(store: Store) -> Manifest | None:
    """The manifest in a folder; None when there is none that can be trusted."""
    return _read_manifest(store, NAME)


def _read_manifest(store: Store, name: str) -> Manifest | None:
    size = store.size(name)
    if size is None or size > LIMIT_BYTES:
        return None
    try:
        return decode_manifest(store.read(name), store.describe(name))
    except CheckpointError:
        return None


def undo(store: Store, save_id: str, rank: int) -> None:
    """Remove what a failed save left behind and publish the committed generation again.

    Every rank calls it, possibly at the same time. A file that can't be removed stays for the next save to
    clear: the failure that is being reported matters more.
    """
    committed = read_committed(store)
    if committed is not None and committed.save_id == save_id:
        return  # the failure came after the commit
    if rank == 0:
        with contextlib.suppress(OSError):
            _restore(store, committed, _read_manifest(store, staged_name(NAME, save_id)))
    # The staged manifest last: it says what else there is to remove.
    for name in sorted(_names(store), key=lambda name: name == staged_name(NAME, save_id)):
        if _save_id_of(name) == save_id:
            with contextlib.suppress(OSError):
                store.remove(name)
                reached(Step.UNDONE, name)
    with contextlib.suppress(OSError):
        store.sync()


def _restore(store: Store, committed: Manifest | None, failed: Manifest | None) -> None:
    """Give the committed files their names again; remove what the failed save published besides."""
    kept = set(committed.published) if committed is not None else set()
    for name in sorted(kept):
        assert committed is not None
        aside = staged_name(name, committed.save_id)
        if store.size(aside) is not None:
            store.rename(aside, name)
            reached(Step.RESTORED, name)
    for name in sorted(set(failed.published if failed is not None else []) - kept):
        store.remove(name)
        reached(Step.UNDONE, name)


def _names(store: Store) -> list[str]:
    try:
        return list(store.list())
    except OSError:
        return []


def _read_index(store: Store, writer: Writer) -> Index:
    place = store.describe(writer.index)
    try:
        data = store.read(writer.index)
    except FileNotFoundError as error:
        raise SaveError(
            f"Rank 0 can't see what rank {writer.rank} wrote",
            where=place,
            got="no such file",
            expected="one folder that all ranks share",
            do="save to a file system that is shared by all nodes",
        ) from error
    if digest(data).hex() != writer.digest:
        raise SaveError(
            f"Rank {writer.rank}'s index reads back other than it was written",
            where=place,
            got=digest(data).hex(),
            expected=writer.digest,
        )
    return decode_index(data, place)


def _check_whole(contents: Contents, indexes: list[Index], store: Store, step: int) -> None:
    for part in (TORCH_DIST, SAFETENSORS):
        records = _records(indexes, part)
        faults = find_faults(records)
        if part == SAFETENSORS and contents.safetensors is not None:
            missing = contents.safetensors.places.keys() - {record.key for record in records}
            faults += [f"{name}: no rank has it" for name in sorted(missing)]
        if faults:
            raise RefusedError(
                "The checkpoint would not be whole",
                where=f"step {step}, {store.describe()}, {part}",
                got="; ".join(faults[:5]) + (f" and {len(faults) - 5} more" if len(faults) > 5 else ""),
                expected="every element of every tensor once",
            )


def _write_metadata(
    contents: Contents, store: Store, save_id: str, indexes: list[Index]
) -> tuple[Index, Writer]:
    """The stock metadata, which only rank 0 can write, in an index of its own."""
    files = SaveFiles(store)
    if contents.torch_dist is not None:
        folder = contents.torch_dist.folder
        metadata = torch_dist.metadata_bytes(_records(indexes, TORCH_DIST), _objects(indexes), folder)
        for name, data in ((torch_dist.METADATA, metadata), (torch_dist.CONFIG, torch_dist.CONFIG_BYTES)):
            files.put(staged_name(folder + name, save_id), folder + name, data)
    try:
        files.finish()
    finally:
        files.close()
    index = Index(save_id, 0, files.extents, {}, {})
    data = index.encode()
    name = f"{contents.index_folder}__metadata.{save_id}.index"
    store.put(name, data)
    reached(Step.DESCRIBED)
    return index, Writer(0, name, digest(data).hex(), sum(extent.length for extent in files.extents))


def _publish(store: Store, manifest: Manifest, before: Manifest | None) -> None:
    """Rename staged files to their fixed names, keeping the committed generation's under staged names."""
    kept = set(before.published) if before is not None else set()
    if before is not None and kept - set(manifest.published):
        store.put(staged_name(NAME, before.save_id), before.encode())  # it names files that are to go
    for name in manifest.published:
        if before is not None and name in kept:
            aside = staged_name(name, before.save_id)
            if store.size(aside) is None and store.size(name) is not None:
                store.rename(name, aside)
                reached(Step.SET_ASIDE, name)
        store.rename(staged_name(name, manifest.save_id), name)
        reached(Step.PUBLISHED, name)
    store.sync()
    reached(Step.VISIBLE)


def _clear(store: Store, manifest: Manifest) -> None:
    """Remove older generations and the leftovers of saves that never committed.

    Names that such a save has published are found in its staged manifest, which therefore goes last.
    """
    names = sorted(store.list())
    staged = [name for name in names if name.startswith(f"{NAME}.") and _save_id_of(name) is not None]
    others = [_read_manifest(store, name) for name in staged]
    published = {name for other in others if other is not None for name in other.published}
    for name in sorted(published - set(manifest.published)):
        store.remove(name)
        reached(Step.CLEARED, name)
    for name in [name for name in names if name not in staged] + staged:
        is_old = _save_id_of(name) not in (None, manifest.save_id)
        if is_old or name in staged or TEMPORARY.fullmatch(name):
            store.remove(name)
            reached(Step.CLEARED, name)
    store.sync()


def _save_id_of(name: str) -> str | None:
    found = _SAVE_ID.search(name)
    return found.group(1) if found else None


def _is_fixed(name: str) -> bool:
    return _save_id_of(name) is None


def _records(indexes: Iterable[Index], part: str) -> list[TensorRecord]:
    return [record for index in indexes for record in index.tensors.get(part, [])]


def _objects(indexes: Iterable[Index]) -> list[ObjectRecord]:
    return [record for index in indexes for record in index.objects.get(TORCH_DIST, [])]


def _content(contents: Contents, indexes: list[Index]) -> dict[str, object]:
    parts = {part: _records(indexes, part) for part in (TORCH_DIST, SAFETENSORS)}
    return {
        **contents.notes,
        "formats": {
            part: {"num_tensors": len({record.key for record in records}), "num_boxes": len(records)}
            for part, records in parts.items()
            if records
        },
    }
