"""Connections to a TCPStore server that never leave their caller hanging."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, TCPStore

from landfall.coord.base import StoreLostError

Answer = TypeVar("Answer")


class Connections:
    """As many connections to the server at ``host:port`` as there are threads in a call at the same time.

    One connection serves one call at a time (a TCPStore client holds a lock while it waits), so a thread
    that waits for a late rank never keeps another thread from posting.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def call(self, request: Callable[[TCPStore], Answer], limit_s: float) -> Answer:
        """The answer to ``request``; raises what it raises.

        :class:`StoreLostError` if the connection broke, or if there is no answer after ``limit_s``:
        a machine that lost its power never closes its connections.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or _Connection(self.host, self.port, limit_s)
        answer = connection.submit(request)
        if not wait([answer], timeout=limit_s).done:
            connection.close()
            raise self._lost(f"no answer in {limit_s:.1f} s")
        error = answer.exception()
        if isinstance(error, DistNetworkError):
            connection.close()
            raise self._lost(str(error).splitlines()[0]) from error
        with self._lock:
            self._idle.append(connection)
        return answer.result()

    def close(self) -> None:
        """Close the idle connections. A later call opens a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _lost(self, got: str) -> StoreLostError:
        return StoreLostError(where=f"the message store of rank 0 at {self.host}:{self.port}", got=got)


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
            store = store or _connect(host, port, connect_s)
            answer.set_result(request(store))
        except BaseException as error:  # whatever it is, the caller's thread raises it
            answer.set_exception(error)
        del task, request, answer  # an idle thread must not keep the last payload alive


def _connect(host: str, port: int, limit_s: float) -> TCPStore:
    try:
        # TCPStore goes on trying where nobody listens any more; there is nothing to wait for.
        socket.create_connection((host, port), timeout=limit_s).close()
    except OSError as error:
        raise DistNetworkError(str(error)) from error
    timeout = timedelta(seconds=max(limit_s, 1.0))
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
