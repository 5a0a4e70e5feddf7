"""A coordinator over a TCPStore of our own: rank 0 keeps the messages, in a thread that needs no GIL.

No process group takes part. A process group's default store is used once, at the start, to tell the other
ranks where rank 0 listens.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from landfall.coord.base import Coordinator
from landfall.coord.connections import Connections
from landfall.coord.meeting import meet_at, meet_through
from landfall.errors import DeadlineError

PART_BYTES = 4 << 20
"""The server refuses values above 8 MiB by closing the connection; longer messages travel in parts."""

BATCH_KEYS = 4096
"""Keys in one request. The server refuses more than 131,072."""

GRACE_S = 20.0
"""How long after its deadline a request may still be answered before the server counts as lost: longer
than the server waits for a name server when somebody connects."""

POST_LIMIT_S = 30.0
"""How long the server may take to store one part, or to forget one."""

_HEADER = struct.Struct("<I")  # how many further parts a message has


class TCPStoreCoordinator(Coordinator):
    """Ranks of one job that talk through the server which rank 0 holds.

    Any number of threads may use it at the same time. Every call ends: a server that is gone or frozen
    raises :class:`~landfall.coord.base.StoreLostError` at the latest ``GRACE_S`` after the deadline.
    After a fork only the parent may go on using it.
    """

    def __init__(
        self, rank: int, world_size: int, run_id: str, connections: Connections, server: TCPStore | None
    ) -> None:
        self.rank, self.world_size, self.run_id = rank, world_size, run_id
        self._connections = connections
        self._server = server  # lives as long as this object, on rank 0
        self._num_parts: dict[str, int] = {}

    @classmethod
    def start(
        cls,
        rank: int,
        world_size: int,
        *,
        rendezvous: Store | None = None,
        address: tuple[str, int] | None = None,
        deadline_s: float = 300.0,
    ) -> TCPStoreCoordinator:
        """Call once on every rank; returns when this rank reaches rank 0's server.

        Rank 0 listens on a free port and publishes it in ``rendezvous``, a store that all ranks share; or
        everybody is told ``address``, host and port of rank 0. The n-th start of a rank through one
        rendezvous meets the n-th start of the others.
        """
        if (rendezvous is None) == (address is None):
            raise ValueError("give either a rendezvous store or the address of rank 0")
        if rendezvous is not None:
            met = meet_through(rendezvous, rank, deadline_s)
        else:
            assert address is not None
            met = meet_at(*address, rank, deadline_s)
        return cls(rank, world_size, met.run_id, met.connections, met.server)

    @classmethod
    def from_process_group(cls, deadline_s: float = 300.0) -> TCPStoreCoordinator:
        """For all ranks of the default process group; call it after ``init_process_group``."""
        store = dist.distributed_c10d._get_default_store()
        rendezvous = PrefixStore("landfall", store)
        return cls.start(dist.get_rank(), dist.get_world_size(), rendezvous=rendezvous, deadline_s=deadline_s)

    def post(self, key: str, payload: bytes) -> None:
        view = memoryview(payload)
        num_further = max(0, -(-len(view) // PART_BYTES) - 1)
        for part in range(1, num_further + 1):
            self._set(
                _part_key(key, self.rank, part), bytes(view[part * PART_BYTES : (part + 1) * PART_BYTES])
            )
        if num_further:
            self._num_parts[key] = num_further
        # The first part last: with it the message is there.
        self._set(_key(key, self.rank), _HEADER.pack(num_further) + view[:PART_BYTES])

    def collect(self, key: str, ranks: Iterable[int], deadline_s: float) -> dict[int, bytes]:
        wanted = sorted(set(ranks))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.world_size:
            raise ValueError(f"ranks {wanted[0]}..{wanted[-1]} of a world of {self.world_size}")
        until = time.monotonic() + deadline_s
        messages: dict[int, bytes] = {}
        for start in range(0, len(wanted), BATCH_KEYS):
            batch = wanted[start : start + BATCH_KEYS]
            try:
                heads = self._get([_key(key, rank) for rank in batch], until)
                for rank, head in zip(batch, heads, strict=True):
                    messages[rank] = self._whole(key, rank, head, until)
            except DistStoreError:
                self._raise_if_missing(key, wanted[start:], deadline_s)
                return messages | self.collect(key, wanted[start:], GRACE_S)  # came at the last moment
        return messages

    def arrived(self, key: str, ranks: Sequence[int]) -> list[int]:
        names = {_key(key, rank): rank for rank in ranks}
        found = self._connections.call(lambda store: _present(store, list(names)), POST_LIMIT_S)
        return [names[name] for name in found]

    def drop(self, key: str) -> None:
        # The first part first: without it there is no message.
        keys = [_key(key, self.rank)]
        keys += [_part_key(key, self.rank, part + 1) for part in range(self._num_parts.pop(key, 0))]
        self._connections.call(lambda store: [store.delete_key(each) for each in keys], POST_LIMIT_S)

    def note(self, key: str, payload: bytes) -> None:
        if len(payload) > PART_BYTES:
            raise ValueError(f"a note of {len(payload):,} bytes; the most is {PART_BYTES:,}")
        self._set(f"note/{key}", payload)

    def notes(self, keys: Sequence[str]) -> dict[str, bytes]:
        def request(store: TCPStore) -> dict[str, bytes]:
            found = _present(store, [f"note/{key}" for key in keys])
            return dict(zip(found, store.multi_get(found), strict=True)) if found else {}

        answers = self._connections.call(request, POST_LIMIT_S)
        return {name.removeprefix("note/"): value for name, value in answers.items()}

    def erase(self, keys: Sequence[str]) -> None:
        self._connections.call(lambda store: [store.delete_key(f"note/{key}") for key in keys], POST_LIMIT_S)

    def close(self, deadline_s: float = 30.0) -> tuple[int, ...]:
        try:
            self.post("landfall/left", b"")
            if self.rank == 0:
                self.collect("landfall/left", range(self.world_size), deadline_s)
        except DeadlineError as error:
            return error.missing
        finally:
            self._connections.close()
        return ()

    def _set(self, key: str, value: bytes) -> None:
        def request(store: TCPStore) -> None:
            store.set(key, value)  # type: ignore[arg-type]  # takes bytes as they are; its stub says str
            store.check([key])  # set() returns before the server has it; this is answered after

        self._connections.call(request, POST_LIMIT_S)

    def _get(self, keys: list[str], until: float) -> list[bytes]:
        """The values of ``keys``; DistStoreError when one isn't there at the time ``until``."""

        def request(store: TCPStore) -> list[bytes]:
            store.set_timeout(timedelta(seconds=max(until - time.monotonic(), 0.001)))
            return store.multi_get(keys)  # waits for all of them, then reads them

        return self._connections.call(request, max(until - time.monotonic(), 0.0) + GRACE_S)

    def _whole(self, key: str, rank: int, head: bytes, until: float) -> bytes:
        (num_further,) = _HEADER.unpack_from(head)
        if not num_further:
            return head[_HEADER.size :]
        parts = (self._get([_part_key(key, rank, part + 1)], until)[0] for part in range(num_further))
        return b"".join([head[_HEADER.size :], *parts])

    def _raise_if_missing(self, key: str, ranks: Sequence[int], waited_s: float) -> None:
        missing = self._connections.call(lambda store: _missing(store, key, ranks), POST_LIMIT_S)
        if missing:
            raise DeadlineError(
                f"Rank {self.rank} waited {waited_s:g} s in vain for message {key!r}",
                missing=tuple(missing),
                where=f"run {self.run_id}",
                do="look at the logs of the missing ranks: they ended, hang, or failed before this message",
            ) from None


def _key(key: str, rank: int) -> str:
    return f"message/{key}/{rank}"


def _part_key(key: str, rank: int, part: int) -> str:
    return f"part{part}/{key}/{rank}"


def _missing(store: TCPStore, key: str, ranks: Sequence[int]) -> list[int]:
    """Which of ``ranks`` have no message under ``key``: few questions where few are missing."""
    if len(ranks) <= BATCH_KEYS and store.check([_key(key, rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _missing(store, key, ranks[:middle]) + _missing(store, key, ranks[middle:])


def _present(store: TCPStore, names: Sequence[str]) -> list[str]:
    """Which of ``names`` have a value: few questions where few are missing."""
    if not names:
        return []
    if len(names) <= BATCH_KEYS and store.check(list(names)):
        return list(names)
    if len(names) == 1:
        return []
    middle = len(names) // 2
    return _present(store, names[:middle]) + _present(store, names[middle:])
