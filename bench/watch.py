"""Run a command and record device and host memory while it runs, with marks where its output says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARKS = {
    r"training (begins|goes on)": "training",
    r"evaluation after step (\d+)": "evaluation",
    r"saved .*checkpoint-(\d+)": "saved",
    r"NOT SAVED": "not saved",
    r"Error": "error",
}


@dataclass
class Watched:
    """What was seen: samples of (seconds, device MiB used, host MiB resident), and marks of (seconds, text)."""

    code: int = 0
    seconds: float = 0.0
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))


def watch(
    command: list[str],
    environment: dict[str, str],
    on_line: Callable[[str, subprocess.Popen[str]], None] = lambda line, process: None,
    period_s: float = 0.2,
) -> Watched:
    """Run ``command`` to its end; ``on_line`` sees each line of output as it comes."""
    watched, started = Watched(), time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, watched, started, period_s, done))
    sampler.start()
    assert process.stdout is not None
    for line in process.stdout:
        now = time.monotonic() - started
        watched.lines.append(line.rstrip())
        print(f"{now:7.1f}s  {line.rstrip()[:220]}", flush=True)
        watched.marks += [(now, mark) for pattern, mark in MARKS.items() if re.search(pattern, line)]
        on_line(line, process)
    watched.code = process.wait()
    watched.seconds = time.monotonic() - started
    done.set()
    sampler.join()
    return watched


def _sample(pid: int, watched: Watched, started: float, period_s: float, done: threading.Event) -> None:
    read_device = _device_reader()
    while not done.wait(period_s):
        watched.samples.append((time.monotonic() - started, read_device(), _resident_mib(pid)))


def _device_reader() -> Callable[[], float]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20
    except Exception as error:
        print(f"no device to read: {error}", file=sys.stderr)
        return lambda: 0.0


def _resident_mib(pid: int) -> float:
    """Of the process and all below it."""
    import psutil

    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.Error:
        pass
    return total / 2**20


def plot(runs: dict[str, Watched], path: Path, title: str) -> None:
    """Device and host memory of one or several runs over time, with their marks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(runs), figsize=(7 * len(runs), 7), squeeze=False, sharex="col", sharey="row"
    )
    for column, (name, run) in enumerate(runs.items()):
        times = [sample[0] for sample in run.samples]
        for row, what in enumerate(("device memory used, GiB", "host memory resident, GiB")):
            axis: Any = axes[row][column]
            axis.plot(times, [sample[1 + row] / 1024 for sample in run.samples], linewidth=1.5)
            axis.set_ylabel(what if column == 0 else "")
            axis.grid(alpha=0.3)
            for at, mark in run.marks:
                axis.axvline(
                    at, color="tab:red" if "error" in mark or "not" in mark else "tab:gray", alpha=0.5
                )
                if row == 0:
                    axis.text(at, axis.get_ylim()[1], mark, rotation=90, va="top", fontsize=7)
        axes[0][column].set_title(name)
        axes[1][column].set_xlabel("seconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=110, bbox_inches="tight")
