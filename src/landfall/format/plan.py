"""Who writes what: a fixed rule over the shard tables, so that ranks need not ask each other.

Ranks that hold the same boxes have the same table of them, and each computes the same assignment from it.
Whether the tables really are the same is checked by digest before the commit.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import xxhash

from landfall.format.shards import ObjectShard, Shard

Item = TypeVar("Item", Shard, ObjectShard)


SMALLEST_PART_BYTES = 1 << 20
"""Boxes are not cut into smaller parts than that: every part costs an entry in the index."""


class TableDigest(msgspec.Struct, frozen=True, array_like=True):
    """One replica set's table as one rank sees it: all ``num_replicas`` members must report the same."""

    replicas: bytes
    num_replicas: int
    table: bytes


def my_share(
    items: Sequence[Item],
    rank: int,
    *,
    whole_tensors: bool = False,
    loads: Mapping[int, int] | None = None,
) -> list[Item]:
    """The items that ``rank`` writes, in the given order; boxes that are large for their set in parts.

    Within each replica set, units go in order of falling size to the member with the fewest bytes so far;
    ties go round the set from a start that differs by set, so that many small sets don't all load their
    first member. A unit is a box, or all boxes of a tensor that should not be scattered (``whole_tensors``;
    boxes are then cut between rows only). ``loads`` are bytes that the members of one set have to write
    anyway: that set evens them out. All members of a set must pass the same items of it, and the same loads.
    """
    sets = _by_replicas(items)
    unit = _tensor_of if whole_tensors else _box_of
    loaded = tuple(sorted(loads or {}))
    limits: dict[tuple[int, ...], int] = {}
    mine: set[tuple[Hashable, tuple[int, ...]]] = set()
    for replicas, members in sets.items():
        limits[replicas] = max(SMALLEST_PART_BYTES, int(_mean_bytes(members, replicas)) // 8)
        cut = [part for item in members for part in _cut(item, limits[replicas], whole_tensors)]
        known = loads if loads is not None and replicas == loaded else {}
        writers = _assign(cut, replicas, unit, known, limits[replicas])
        mine.update((name, replicas) for name, writer in writers.items() if writer == rank)
    parts = (part for item in items for part in _cut(item, limits[item.replicas], whole_tensors))
    return [part for part in parts if (_unit(part, unit, limits[part.replicas]), part.replicas) in mine]


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


def _cut(item: Item, limit: int, by_rows: bool) -> Iterator[Item]:
    """``item``, or if it is larger than ``limit`` parts of about that size."""
    if isinstance(item, ObjectShard) or len(item.replicas) == 1 or item.num_bytes <= limit:
        yield item
        return
    yield from item.cut(limit, 0 if by_rows else None)


def _unit(item: Item, unit: Callable[[Item], Hashable], limit: int) -> Hashable:
    """Parts that were cut from a large box are units of their own, of whatever tensor they are."""
    return _box_of(item) if 2 * _num_bytes(item) > limit else unit(item)


def _mean_bytes(items: Sequence[Item], replicas: tuple[int, ...]) -> float:
    return sum(map(_num_bytes, items)) / len(replicas)


def _assign(
    items: list[Item],
    replicas: tuple[int, ...],
    unit: Callable[[Item], Hashable],
    known: Mapping[int, int],
    limit: int,
) -> dict[Hashable, int]:
    unit_bytes: dict[Hashable, int] = defaultdict(int)
    for item in items:
        unit_bytes[_unit(item, unit, limit)] += _num_bytes(item)
    start = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(replicas)) % len(replicas)
    members = replicas[start:] + replicas[:start]
    loads = [(known.get(member, 0), position) for position, member in enumerate(members)]
    heapq.heapify(loads)
    writers = {}
    for name, num_bytes in sorted(unit_bytes.items(), key=lambda entry: (-entry[1], str(entry[0]))):
        load, position = heapq.heappop(loads)
        writers[name] = members[position]
        heapq.heappush(loads, (load + num_bytes, position))
    return writers


def _num_bytes(item: Shard | ObjectShard) -> int:
    return item.num_bytes if isinstance(item, Shard) else len(item.payload)


def _row(item: Shard | ObjectShard) -> bytes:
    if isinstance(item, Shard):
        return msgspec.msgpack.encode((item.key, str(item.data.dtype), item.global_shape, item.box))
    return msgspec.msgpack.encode((item.key, "object"))
