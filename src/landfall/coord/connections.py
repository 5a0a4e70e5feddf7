"""Connections to a TCPStore server that never leave their caller hanging."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, TCPStore

from landfall.coord.base import StoreLostError

Answer = TypeVar("Answer")

CONNECT_S = 15.0
"""How long to try one address. The server looks up the name of whoever connects, and a name server that
does not answer keeps it (and everybody who talks to it) waiting for 5 or 10 s."""

DYING_S = 0.2
"""How long the kernel may take to close all that a killed process had open."""

SETTLE_S = 5.0
"""How much longer than its limit a client may take to give up connecting: it looks names up meanwhile."""


class Connections:
    """As many connections to the server at ``host:port`` as there are threads in a call at the same time.

    One connection serves one call at a time (a TCPStore client holds a lock while it waits), so a thread
    that waits for a late rank never keeps another thread from posting.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[_Connection] = []
        self._reached = False
        self._lock = threading.Lock()

    def call(self, request: Callable[[TCPStore], Answer], limit_s: float) -> Answer:
        """The answer to ``request``, which must be harmless to ask twice; raises what it raises.

        :class:`StoreLostError` if the server is gone, or if there is no answer after ``limit_s``: a
        machine that lost its power never closes its connections.
        """
        until = time.monotonic() + limit_s
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._ask(connection, request, until)
            except DistNetworkError:
                # Perhaps only this connection: firewalls forget those that were idle for long. Or the server
                # is being killed; for a moment its port still takes connections then, which go nowhere.
                time.sleep(DYING_S)
        try:
            # A client that can't connect says so soon after its time is up, so let it: one that is left
            # behind can bring down a process that is about to end.
            return self._ask(self._open(limit_s), request, until + SETTLE_S)
        except DistNetworkError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Close the idle connections. A later call opens a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _open(self, limit_s: float) -> _Connection:
        limit_s = min(limit_s, CONNECT_S)
        if self._reached:
            # A TCPStore client goes on trying where nobody listens any more; this tells at once.
            try:
                socket.create_connection((self.host, self.port), timeout=limit_s).close()
            except OSError as error:
                raise self._lost(error) from error
        return _Connection(self.host, self.port, limit_s)

    def _ask(self, connection: _Connection, request: Callable[[TCPStore], Answer], until: float) -> Answer:
        answer = connection.submit(request)
        if not wait([answer], timeout=max(until - time.monotonic(), 0.0)).done:
            connection.close()
            raise self._lost("it does not answer")
        if isinstance(answer.exception(), DistNetworkError):
            connection.close()
        else:
            self._reached = True
            with self._lock:
                self._idle.append(connection)
        return answer.result()

    def _lost(self, got: object) -> StoreLostError:
        return StoreLostError(where=f"{self.host}:{self.port}", got=str(got).splitlines()[0])


class _Connection:
    """One TCPStore client, used by one daemon thread.

    A client that waits for bytes of a dead machine can't be interrupted; its caller can leave it behind
    if it waits in a thread of its own.
    """

    def __init__(self, host: str, port: int, connect_s: float) -> None:
        self._requests: SimpleQueue[tuple[Callable[[TCPStore], Any], Future[Any]] | None] = SimpleQueue()
        serve = threading.Thread(
            target=_serve, args=(host, port, connect_s, self._requests), name="landfall-store", daemon=True
        )
        serve.start()

    def submit(self, request: Callable[[TCPStore], Answer]) -> Future[Answer]:
        answer: Future[Answer] = Future()
        self._requests.put((request, answer))
        return answer

    def close(self) -> None:
        self._requests.put(None)


def _serve(host: str, port: int, connect_s: float, requests: SimpleQueue[Any]) -> None:
    store: TCPStore | None = None
    while (task := requests.get()) is not None:
        request, answer = task
        try:
            if store is None:
                timeout = timedelta(seconds=connect_s)
                store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            answer.set_result(request(store))
        except BaseException as error:  # whatever it is, the caller's thread raises it
            answer.set_exception(error)
        del task, request, answer  # an idle thread must not keep the last payload alive
