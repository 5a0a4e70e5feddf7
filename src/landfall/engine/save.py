"""Save a checkpoint: planned without a word, written by everyone, committed once.

Nothing here talks through torch.distributed, and nothing allocates on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from landfall.engine.agree import Outcome, Report, agree, told_as_save_error
from landfall.engine.commit import undo
from landfall.engine.contents import Contents
from landfall.engine.export import stay_away
from landfall.engine.part import Written, write_part
from landfall.engine.peers import PeerLostError
from landfall.engine.protocol import Step, reached
from landfall.engine.pulse import Pulse
from landfall.engine.session import Session
from landfall.errors import RanksMissingError, RefusedError, SaveError
from landfall.format.index import file_name
from landfall.format.manifest import Manifest, decode_manifest
from landfall.format.plan import table_digests
from landfall.store.base import Store


def save(
    contents: Contents | Callable[[], Contents], store: Store, session: Session, *, step: int
) -> Manifest:
    """Save ``contents`` into the folder ``store``; every rank calls it, in the same order as all its saves.

    ``contents`` may be a function that makes them: an error in it then fails the save on every rank, as any
    other does. On return on every rank the checkpoint is committed: durable, complete, and the only thing
    that a reader sees in the folder. On a :class:`~landfall.errors.SaveError` (raised on every rank) what
    was committed in the folder before is still there, whole, and the partial save is removed. It is a
    RefusedError if trying again is of no use, a RanksMissingError if ranks made no progress for the
    session's deadline.
    """
    save_id = session.next_save_id()
    reached(Step.BEGUN)
    with Pulse(session.coordinator, save_id, session.deadline_s) as pulse:
        error, follows, made, written = "", False, None, None
        try:
            with told_as_save_error(session.rank, step, store):
                made = contents() if callable(contents) else contents
                written = write_part(made, store, session, save_id, pulse)
        except SaveError as caught:
            error, follows = str(caught), isinstance(caught, PeerLostError)
            if made is None:
                stay_away(session, save_id)
        report = _report(made, written, error, store, session, step)
        report = msgspec.structs.replace(report, follows=follows)
        outcome = agree(report, made, store, session, save_id, pulse)
    if outcome.error:
        undo(store, save_id, session.rank)
        raise _as_error(outcome)
    session.last_saved = (step, report.tensors)
    return decode_manifest(outcome.manifest, store.describe())


def _report(
    contents: Contents | None, written: Written | None, error: str, store: Store, session: Session, step: int
) -> Report:
    place = store.describe()
    if contents is None or written is None:
        return Report(session.rank, step, place, error, [])
    index, last = written.index, session.last_saved
    return Report(
        session.rank,
        step,
        place,
        "",
        table_digests(contents.shards()),
        index=file_name(index.save_id, session.rank, contents.index_folder),
        index_digest=written.index_digest,
        num_bytes=sum(extent.length for extent in index.extents),
        tensors=written.tensors_digest,
        unchanged_since=last[0] if last is not None and last[1] == written.tensors_digest else None,
    )


def _as_error(outcome: Outcome) -> SaveError:
    if outcome.missing:
        return RanksMissingError(outcome.error, missing=tuple(outcome.missing))
    return RefusedError(outcome.error) if outcome.is_refusal else SaveError(outcome.error)
