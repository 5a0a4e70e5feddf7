"""Matrices that tensor-parallel ranks hold by columns, put together row by row for a file.

A row of the file has a part from every rank of a group. Each rank writes a range of the rows: it gets the
others' parts of them, and sends its own part of theirs. All do so in the same order, a chunk at a time, so
no rank waits for one that waits for it.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from landfall.engine.peers import Peers
from landfall.engine.stage import StagedPieces, Stager
from landfall.engine.write import ExtentWriter
from landfall.errors import LandfallError, SaveError
from landfall.format.shards import Box, Shard

CHUNK_BYTES = 8 << 20
"""What a rank holds of the matrix that it is writing; a row at least."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Matrix:
    """One column of a matrix, and the group that puts it together."""

    shard: Shard
    group: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.shard.global_shape[1] * self.shard.data.element_size()

    def rows(self, member: int) -> range:
        """The rows that the group's member number ``member`` writes."""
        num_rows, size = self.shard.global_shape[0], len(self.group)
        return range(num_rows * member // size, num_rows * (member + 1) // size)

    def box(self, member: int) -> Box:
        rows = self.rows(member)
        return Box((rows.start, 0), (len(rows), self.shard.global_shape[1]))

    def chunk(self, member: int, number: int) -> range:
        """The ``number``-th few of a member's rows; empty when there are no more."""
        size = max(1, CHUNK_BYTES // self.row_bytes)
        return self.rows(member)[number * size : (number + 1) * size]

    @property
    def num_chunks(self) -> int:
        """Of the member that has most."""
        longest = max(len(self.rows(member)) for member in range(len(self.group)))
        return -(-longest // max(1, CHUNK_BYTES // self.row_bytes))


def my_matrices(shards: Sequence[Shard], groups: Groups, rank: int) -> list[Matrix]:
    """Those that this rank's group writes, sorted by name; the groups share them by bytes.

    A function of what all ranks of the groups know. Raises ValueError for boxes that are not equal columns
    of a matrix in the order of their group.
    """
    group = next((group for group in groups if rank in group), ())
    for shard in shards:
        if not _is_column(shard, group, rank):
            raise ValueError(f"{shard.key}: {shard.box} is not the column of rank {rank} in {group}")
    loads = [(0, number) for number in range(len(groups))]
    mine = []
    for shard in sorted(shards, key=lambda shard: (-shard.num_bytes, shard.key)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + shard.num_bytes, number))
        if groups[number] == group:
            mine.append(Matrix(shard, group))
    return sorted(mine, key=lambda matrix: matrix.shard.key)


def _is_column(shard: Shard, group: tuple[int, ...], rank: int) -> bool:
    if len(shard.global_shape) != 2 or rank not in group:
        return False
    (num_rows, num_columns), width = shard.global_shape, shard.box.sizes[1]
    return width * len(group) == num_columns and shard.box == Box(
        (0, group.index(rank) * width), (num_rows, width)
    )


class ColumnExchange:
    """Gives the rows that this rank writes, matrix after matrix, while a thread sends it to the others."""

    def __init__(
        self, matrices: Sequence[Matrix], peers: Peers, stager: Stager, sending_stager: Stager
    ) -> None:
        self._matrices, self._peers = matrices, peers
        self._member, self._size = peers.group.index(peers.rank), len(peers.group)
        own = (self._slice(matrix, self._member, c) for matrix in matrices for c in range(matrix.num_chunks))
        self._own = StagedPieces(stager.pieces(own))
        self._sending_stager = sending_stager
        self._error: Exception | None = None
        self._sender = threading.Thread(target=self._send_all, name="landfall-columns", daemon=True)
        self._sender.start()

    def write(self, matrix: Matrix, writer: ExtentWriter) -> None:
        """This rank's rows of the next matrix."""
        for number in range(matrix.num_chunks):
            rows = matrix.chunk(self._member, number)
            if not rows:
                continue  # others may have more
            buffer = numpy.empty((len(rows), self._size, matrix.row_bytes // self._size), numpy.uint8)
            part = bytearray(len(rows) * matrix.row_bytes // self._size)
            self._own.fill(memoryview(part))
            self._place(buffer, self._member, part)
            for step in range(1, self._size):
                member = (self._member - step) % self._size
                self._peers.receive(self._peers.group[member], memoryview(part))
                self._place(buffer, member, part)
            writer.write(buffer.data)

    def finish(self) -> None:
        """Wait until the others have what they need from here."""
        self._sender.join()
        if self._error is not None:
            raise self._error

    def _place(self, buffer: numpy.ndarray, member: int, part: bytearray) -> None:
        buffer[:, member, :] = numpy.frombuffer(part, numpy.uint8).reshape(len(buffer), -1)

    def _slice(self, matrix: Matrix, member: int, number: int) -> torch.Tensor:
        rows = matrix.chunk(member, number)
        return matrix.shard.data[rows.start : rows.stop]

    def _to_send(self) -> Iterator[tuple[int, torch.Tensor]]:
        """In an order in which :meth:`write` receives: in step k each rank sends k places on."""
        for matrix in self._matrices:
            for number in range(matrix.num_chunks):
                for step in range(1, self._size):
                    member = (self._member + step) % self._size
                    yield self._peers.group[member], self._slice(matrix, member, number)

    def _send_all(self) -> None:
        try:
            pieces = StagedPieces(self._sending_stager.pieces(data for _, data in self._to_send()))
            for peer, data in self._to_send():
                for piece in pieces.take(data.numel() * data.element_size()):
                    self._peers.send(peer, piece)
        except LandfallError as error:
            self._fail(error)
        except Exception as error:  # told by finish, on the thread that saves
            self._fail(SaveError("Columns could not be sent", got=f"{type(error).__name__}: {error}"))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._peers.close()
