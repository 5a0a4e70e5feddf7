"""Direct connections between the few ranks that hold one tensor's columns: bytes over TCP, on the CPU."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from landfall.coord.base import Coordinator, StoreLostError
from landfall.coord.meeting import own_hosts
from landfall.errors import DeadlineError, SaveError

_T = TypeVar("_T")

ABSENT = b""
"""What a rank posts instead of its address if it failed before it could meet the others."""
SLICE_S = 1.0
"""How long to wait at a time before looking whether waiting still makes sense."""
_TOKEN_BYTES = 16
_ANSWER_S = 5.0
"""How long a stranger who connects may take to say who he is."""


class _Address(msgspec.Struct, frozen=True):
    hosts: list[str]
    port: int
    token: bytes


class PeerLostError(SaveError):
    """Another rank ended or hung up: most likely it failed first, and knows better why."""


class Peers:
    """One connection to every other rank of ``group``; made by all of them at the same point.

    A peer that ends, or is closed, is noticed at once; one that hangs after ``deadline_s`` seconds. Each
    raises PeerLostError that names it. ``check`` is called about once a second while waiting, and may raise.
    One thread may send while another receives.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        group: Sequence[int],
        key: str,
        deadline_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.group = coordinator.rank, tuple(group)
        self._deadline_s, self._check = deadline_s, check
        self._sockets: dict[int, socket.socket] = {}
        try:
            self._connect(coordinator, key, time.monotonic() + deadline_s)
        except BaseException:
            self.close()
            raise

    def send(self, peer: int, data: memoryview) -> None:
        try:
            while data:
                data = data[self._patiently(partial(self._sockets[peer].send, data)) :]
        except OSError as error:
            raise self._lost(peer, error) from error

    def receive(self, peer: int, into: memoryview) -> None:
        """Fill ``into`` with the next bytes that ``peer`` sends."""
        try:
            while into:
                count = self._patiently(partial(self._sockets[peer].recv_into, into))
                if not count:
                    raise ConnectionError("the connection was closed")
                into = into[count:]
        except OSError as error:
            raise self._lost(peer, error) from error

    def close(self) -> None:
        """Leave: what a peer still waits for from here fails there. Never raises, and may be called twice."""
        for connection in self._sockets.values():
            _hang_up(connection)

    def _connect(self, coordinator: Coordinator, key: str, until: float) -> None:
        """Every rank listens for those after it in the group, and calls those before it."""
        place = self.group.index(self.rank)
        before, after = self.group[:place], set(self.group[place + 1 :])
        with socket.create_server(("", 0)) as server:
            address = _Address(own_hosts(), server.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
            coordinator.post(key, msgspec.msgpack.encode(address))
            for peer, message in self._collect(coordinator, key, before, until).items():
                if message == ABSENT:
                    raise self._lost(peer, ConnectionError("it does not come"))
                self._call(peer, msgspec.msgpack.decode(message, type=_Address))
            server.settimeout(min(SLICE_S, self._deadline_s))
            while missing := sorted(after - self._sockets.keys()):
                absent = partial(self._check_absent, coordinator, key, missing)
                self._accept(server, address.token, missing, absent)
        for connection in self._sockets.values():
            connection.settimeout(SLICE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _patiently(self, attempt: Callable[[], _T], check: Callable[[], None] | None = None) -> _T:
        """What ``attempt`` returns, which raises TimeoutError every SLICE_S; until the deadline."""
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                return attempt()
            except TimeoutError:
                (check or self._check)()
                if time.monotonic() >= until:
                    raise

    def _collect(
        self, coordinator: Coordinator, key: str, ranks: Sequence[int], until: float
    ) -> dict[int, bytes]:
        while True:
            try:
                left = max(until - time.monotonic(), 0.001)
                return coordinator.collect(key, ranks, min(SLICE_S, left))
            except StoreLostError:
                raise
            except DeadlineError:
                self._check()
                if time.monotonic() >= until:
                    raise

    def _call(self, peer: int, address: _Address) -> None:
        failures = []
        for host in address.hosts:
            try:
                connection = socket.create_connection((host, address.port), self._deadline_s)
                connection.sendall(address.token + self.rank.to_bytes(4, "little"))
            except OSError as error:
                failures.append(f"{host}:{address.port}: {error}")
                continue
            self._sockets[peer] = connection
            return
        raise SaveError(
            f"Rank {self.rank} can't reach rank {peer}, with which it shares tensors",
            got="; ".join(failures),
            do="see whether that rank still runs, and open TCP between the machines",
        )

    def _check_absent(self, coordinator: Coordinator, key: str, ranks: Sequence[int]) -> None:
        self._check()
        for rank in ranks:
            with contextlib.suppress(DeadlineError):
                if coordinator.collect(key, [rank], 0.001)[rank] == ABSENT:
                    raise self._lost(rank, ConnectionError("it does not come"))

    def _accept(
        self, server: socket.socket, token: bytes, missing: Sequence[int], check: Callable[[], None]
    ) -> None:
        try:
            connection, _ = self._patiently(server.accept, check)
        except OSError as error:
            raise self._lost(missing[0], error) from error
        hello = bytearray(_TOKEN_BYTES + 4)
        try:
            connection.settimeout(_ANSWER_S)
            _read(connection, memoryview(hello))
        except OSError:
            hello = bytearray()
        peer = int.from_bytes(hello[_TOKEN_BYTES:], "little")
        if secrets.compare_digest(bytes(hello[:_TOKEN_BYTES]), token) and peer in missing:
            self._sockets[peer] = connection
        else:
            connection.close()

    def _lost(self, peer: int, error: OSError) -> PeerLostError:
        return PeerLostError(
            f"Rank {peer} did not hand over its part of a tensor",
            where=f"rank {self.rank}",
            got=str(error) or type(error).__name__,
            do=f"look at the log of rank {peer}: it failed, ended or hangs",
        )


def _read(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the connection was closed")
        into = into[count:]


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
    connection.close()
