"""The rank processes of one launch: started as torchrun starts them, and ended whatever they do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from torch.distributed import TCPStore

from landfall.repro.cases import Launch
from landfall.repro.diary import DiaryReader, Orders, shorten, write_orders
from landfall.repro.listen import BUFFER_ENV
from landfall.repro.outcome import Event, Failure, Frame

_STACK_S = 0.5
_LEAVE_S = 3.0
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


class Ranks:
    """N processes that import at once and begin with :meth:`go`. Killed when the block ends."""

    def __init__(self, launch: Launch, num_ranks: int, folder: Path, *, num_devices: int) -> None:
        self.launch, self._folder = launch, folder
        folder.mkdir(parents=True)
        write_orders(folder, Orders(launch, on_gpu=num_devices > 0))
        # The ranks meet at a store of this process, which outlives each of them.
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environments = [
            _environment(rank, num_ranks, self._store.port, num_devices) for rank in range(num_ranks)
        ]
        self._processes = [self._start(environment) for environment in environments]
        self._readers = [DiaryReader(folder / f"{rank}.diary") for rank in range(num_ranks)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def go(self) -> None:
        """Let them begin, as soon as each has its imports behind it."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended early: events() and exit_code() tell
                process.stdin.write(b"go\n")
                process.stdin.flush()

    def events(self, rank: int) -> list[Event]:
        """What a rank wrote down since the last call."""
        return self._readers[rank].read()

    def exit_code(self, rank: int) -> int | None:
        """None while it runs."""
        return self._processes[rank].poll()

    def output(self, rank: int) -> str:
        """The end of what a rank printed."""
        return (self._folder / f"{rank}.output").read_text(errors="replace")[-2000:].strip()

    def stacks(self, ranks: list[int]) -> dict[int, Failure]:
        """Where the main threads of ``ranks`` are just now."""
        for rank in ranks:
            if self.exit_code(rank) is None:
                self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(_STACK_S)  # written by signal handlers, which can't say when they are done
        return {rank: Failure("", "", self._stack(rank)) for rank in ranks}

    def leave(self) -> None:
        """Let ranks that have nothing more to do end; kill those that don't."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        until = time.monotonic() + _LEAVE_S
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kill all ranks and what they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also helpers that outlived their rank
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{environment['RANK']}.output", "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "landfall.repro.rank", str(self._folder)],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stack(self, rank: int) -> list[Frame]:
        """The last thread in the dump is the main thread, its innermost frame first."""
        text = (self._folder / f"{rank}.stacks").read_text(errors="replace")
        lines = text.rpartition("(most recent call first):\n")[2].splitlines()
        found = [match.groups() for line in lines if (match := _FRAME.match(line))]
        return [Frame(shorten(file), int(line), function) for file, line, function in reversed(found)]


def _environment(rank: int, num_ranks: int, port: int, num_devices: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }
    environment = {name: str(number) for name, number in numbers.items()} | BUFFER_ENV
    environment |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    if num_ranks > num_devices:
        # NCCL refuses two ranks on one device unless it takes them for two machines.
        environment["NCCL_HOSTID"] = f"landfall-repro-{rank}"
    return environment
