"""Who writes what: a fixed rule over the shard tables, so that ranks need not ask each other.

Ranks that hold the same boxes have the same table of them, and each computes the same assignment from it.
Whether the tables really are the same is checked by digest before the commit.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec
import xxhash

from landfall.format.shards import ObjectShard, Shard

Item = TypeVar("Item", Shard, ObjectShard)


class TableDigest(msgspec.Struct, frozen=True, array_like=True):
    """One replica set's table as one rank sees it: all ``num_replicas`` members must report the same."""

    replicas: bytes
    num_replicas: int
    table: bytes


def my_share(items: Sequence[Item], rank: int, *, whole_tensors: bool = False) -> list[Item]:
    """The items that ``rank`` writes, in the given order.

    Within each replica set, units go in order of falling size to the member with the fewest bytes so far;
    ties go round the set from a start that differs by set, so that many small sets don't all load their
    first member. A unit is a box, or all boxes of a tensor where a tensor must have one writer.
    """
    unit = _tensor_of if whole_tensors else _box_of
    mine: set[tuple[Hashable, tuple[int, ...]]] = set()
    for replicas, members in _by_replicas(items).items():
        writers = _assign(members, replicas, unit)
        mine.update((name, replicas) for name, writer in writers.items() if writer == rank)
    return [item for item in items if (unit(item), item.replicas) in mine]


def table_digests(items: Iterable[Item]) -> list[TableDigest]:
    """The digest of each replica set's table, for the check that its members agree.

    Sets of one rank need none: nobody else has a say in them.
    """
    digests = []
    for replicas, members in _by_replicas(items).items():
        if len(replicas) > 1:
            table = xxhash.xxh3_128()
            for row in sorted(_row(item) for item in members):
                table.update(row)
            name = xxhash.xxh3_128_digest(msgspec.msgpack.encode(replicas))
            digests.append(TableDigest(name, len(replicas), table.digest()))
    return digests


def disagreements(reports: dict[int, list[TableDigest]]) -> list[list[int]]:
    """The groups of ranks that should hold the same boxes and don't say so; empty when all agree."""
    seen: dict[bytes, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[bytes, int] = {}
    for rank, digests in reports.items():
        for entry in digests:
            seen[entry.replicas][entry.table].append(rank)
            sizes[entry.replicas] = entry.num_replicas
    return [
        sorted(rank for ranks in tables.values() for rank in ranks)
        for replicas, tables in seen.items()
        if len(tables) > 1 or len(next(iter(tables.values()))) != sizes[replicas]
    ]


def _by_replicas(items: Iterable[Item]) -> dict[tuple[int, ...], list[Item]]:
    sets: dict[tuple[int, ...], list[Item]] = defaultdict(list)
    for item in items:
        sets[item.replicas].append(item)
    return sets


def _tensor_of(item: Shard | ObjectShard) -> Hashable:
    return item.key


def _box_of(item: Shard | ObjectShard) -> Hashable:
    return (item.key, item.box) if isinstance(item, Shard) else (item.key,)


def _assign(
    items: list[Item], replicas: tuple[int, ...], unit: Callable[[Item], Hashable]
) -> dict[Hashable, int]:
    unit_bytes: dict[Hashable, int] = defaultdict(int)
    for item in items:
        unit_bytes[unit(item)] += _num_bytes(item)
    start = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(replicas)) % len(replicas)
    loads = [(0, position) for position in range(len(replicas))]
    writers = {}
    for name, num_bytes in sorted(unit_bytes.items(), key=lambda entry: (-entry[1], entry[0])):
        load, position = heapq.heappop(loads)
        writers[name] = replicas[(start + position) % len(replicas)]
        heapq.heappush(loads, (load + num_bytes, position))
    return writers


def _num_bytes(item: Shard | ObjectShard) -> int:
    return item.num_bytes if isinstance(item, Shard) else len(item.payload)


def _row(item: Shard | ObjectShard) -> bytes:
    if isinstance(item, Shard):
        return msgspec.msgpack.encode((item.key, str(item.data.dtype), item.global_shape, item.box))
    return msgspec.msgpack.encode((item.key, "object"))
