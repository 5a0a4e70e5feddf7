"""Real ranks for tests: processes that start in milliseconds, can be killed, and never outlive their test.

A fork server imports torch, megatron-core and transformers once; every rank is forked from it. The ranks
meet as under torchrun: this process holds the rendezvous store, as torchrun's agent does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from landfall.testing.rank import run_rank

PRELOADED = ["landfall.testing.preload"]
"""Modules that the fork server imports. More can be added before the first rank is started."""

OTHERS_S = 3.0
"""How long the other ranks may take to fail too, once one has: their tracebacks tell more than a kill."""


STACKS_S = 5.0
"""How long a rank may take to write its stacks before it is killed."""


class RanksFailed(Exception):
    """Ranks raised, died or ran out of time. ``failures`` has what each of them left behind."""

    def __init__(self, what: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join([what, *(f"--- rank {rank}: {text}" for rank, text in failures.items())]))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend_env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``fn(*args)`` on ``world_size`` ranks; returns their results by rank.

    ``fn`` is a module-level function; it finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    ``backend_env`` in its environment, and no process group. Raises :class:`RanksFailed` with the
    traceback of every rank that failed; when the time is up, with the stack of every rank that still ran.
    """
    with start_ranks(fn, world_size, *args, backend_env=backend_env) as ranks:
        ranks.wait(timeout_s)
        return ranks.results()


def start_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, backend_env: Mapping[str, str] | None = None
) -> Ranks:
    """Like :func:`run_ranks`, but returns at once: for tests that kill or stop ranks."""
    return Ranks(fn, world_size, args, backend_env or {})


class Ranks:
    """Ranks that run. A context manager: whatever still runs when it ends is killed."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], environment: Mapping[str, str]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="landfall-ranks-"))
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes: list[ForkServerProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(world_size):
            variables = _torchrun_environment(rank, world_size, self._store.port) | dict(environment)
            process = context.Process(
                target=run_rank, args=(fn, args, variables, str(self.folder / str(rank))), name=f"rank {rank}"
            )
            process.start()
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self, rank: int) -> None:
        """kill -9, and wait until the process is gone."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def stop(self, rank: int) -> None:
        """SIGSTOP: the rank keeps its connections and answers nothing."""
        os.kill(self._pid(rank), signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """SIGCONT, after :meth:`stop`."""
        os.kill(self._pid(rank), signal.SIGCONT)

    def exit_codes(self, timeout_s: float = 120.0) -> list[int]:
        """Exit codes by rank (-9: killed); waits for all ranks, whatever becomes of one of them."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(until - time.monotonic(), 0.0))
        if self._running():
            raise RanksFailed(f"Ranks still run after {timeout_s:g} s", self._stacks())
        return [process.exitcode or 0 for process in self.processes]

    def wait(self, timeout_s: float = 120.0) -> None:
        """Until all ranks ended well. Raises RanksFailed soon after one did not, or when the time is up."""
        until = time.monotonic() + timeout_s
        failed_at: float | None = None
        while running := self._running():
            if failed_at is None and self._failed():
                failed_at = time.monotonic()
                until = min(until, failed_at + OTHERS_S)
            left = until - time.monotonic()
            if left <= 0:
                break
            connection.wait([self.processes[rank].sentinel for rank in running], timeout=min(left, 0.5))
        failures = {rank: self._account(rank) for rank in self._failed()}
        if failures or self._running():
            what = "Ranks failed" if failures else f"Ranks still run after {timeout_s:g} s"
            raise RanksFailed(what, failures | self._stacks())

    def results(self) -> list[Any]:
        """What the ranks returned, once all ended well."""
        return [self.result(rank) for rank in range(len(self.processes))]

    def result(self, rank: int) -> Any:
        """What one rank returned."""
        path = self.folder / f"{rank}.result"
        if not path.exists():
            raise RanksFailed(f"Rank {rank} returned nothing", {rank: self._account(rank)})
        return pickle.loads(path.read_bytes())

    def output(self, rank: int) -> str:
        """What the rank and its children wrote to stdout and stderr so far."""
        path = self.folder / f"{rank}.output"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Kill what still runs and forget everything."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def _failed(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode not in (None, 0)]

    def _account(self, rank: int) -> str:
        trace = self.folder / f"{rank}.traceback"
        exit_code = self.processes[rank].exitcode
        told = (
            trace.read_text()
            if trace.exists()
            else f"no traceback; its last output:\n{self.output(rank)[-4000:]}"
        )
        return f"exit code {exit_code}\n{told}"

    def _stacks(self) -> dict[int, str]:
        """The stacks of the ranks that run, then kills them."""
        running = self._running()
        for rank in running:
            self.resume(rank)
            os.kill(self._pid(rank), signal.SIGUSR2)
        stacks = {}
        for rank in running:
            dump = _settled(self.folder / f"{rank}.stacks")
            self.kill(rank)
            stacks[rank] = f"still ran\n{dump}its last output:\n{self.output(rank)[-2000:]}"
        return stacks


def _settled(path: Path) -> str:
    """The text of a file that a signal handler writes, which can't tell when it is done."""
    until = time.monotonic() + STACKS_S
    before = ""
    while time.monotonic() < until:
        text = path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:
            return text
        before = text
        time.sleep(0.1)
    return before or "no stack\n"


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    names = {
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_RUN_ID": "landfall-test",
        # The rendezvous store is in the starting process, so rank 0 does not open one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(number) for name, number in numbers.items()} | names
