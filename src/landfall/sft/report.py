"""What a run tells its user: progress on the terminal, logging.jsonl, tensorboard, and plots."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from landfall.sft.config import Resolved, SftConfig


class Report:
    """Rank 0's mouth; every other rank has one that stays silent (``is_on`` False)."""

    def __init__(self, config: SftConfig, folder: Path, num_steps: int, first_step: int, is_on: bool) -> None:
        self.is_on = is_on
        self._num_steps, self._interval = num_steps, config.log_interval
        self._started, self._last = time.monotonic(), (first_step, time.monotonic())
        self._tokens = 0
        self._console = Console(soft_wrap=True, highlight=False)
        self._progress: Progress | None = None
        self._board: Any = None
        if is_on:
            self._log = open(folder / "logging.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
            self._images = folder / "images"
            if "tensorboard" in config.report_to:
                self._board = _open_board(Path(config.tensorboard_dir or folder / "runs"))
            if sys.stdout.isatty():
                self._progress = _progress_bar(self._console)
                self._task = self._progress.add_task("train", total=num_steps, completed=first_step, note="")
                self._progress.start()

    def say(self, text: str) -> None:
        """A line for the user, above the progress bar."""
        if self.is_on:
            self._console.print(text, markup=False)

    def step(self, step: int, values: dict[str, float], num_tokens: int) -> None:
        """One training step is done; ``step`` counts from 1, ``num_tokens`` are those of text and images."""
        if not self.is_on:
            return
        self._tokens += num_tokens
        if self._progress is not None:
            note = f"loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}"
            self._progress.update(self._task, completed=step, note=note)
        if step % self._interval and step not in (1, self._num_steps):
            return
        steps, since = self._last
        elapsed = max(time.monotonic() - since, 1e-9)
        rate = (step - steps) / elapsed
        entry = {
            **values,
            "tokens_per_s": round(self._tokens / elapsed, 1),
            "train_speed(iter/s)": round(rate, 4),
            "memory(GiB)": round(_peak_bytes() / 2**30, 3),
            "iteration": f"{step}/{self._num_steps}",
            "elapsed_time": _clock(time.monotonic() - self._started),
            "remaining_time": _clock((self._num_steps - step) / rate if rate else 0),
        }
        self._write(entry, step)
        if self._progress is None:
            self.say(_line(step, self._num_steps, entry))
        self._last, self._tokens = (step, time.monotonic()), 0

    def evaluation(self, step: int, loss: float, num_tokens: int) -> None:
        """The validation loss after ``step``."""
        if self.is_on:
            self._write(
                {"eval_loss": loss, "eval_tokens": num_tokens, "iteration": f"{step}/{self._num_steps}"}, step
            )
            self.say(f"evaluation after step {step}: loss {loss:.4f} over {num_tokens:,} tokens")

    def close(self) -> None:
        """Finish the files and draw the plots from the log."""
        if not self.is_on:
            return
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        self._log.close()
        draw_plots(Path(self._log.name), self._images)

    def _write(self, entry: dict[str, Any], step: int) -> None:
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()
        if self._board is not None:
            kind = "eval" if "eval_loss" in entry else "train"
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)


def show_configuration(resolved: Resolved, console: Console | None = None) -> None:
    """Print every value with its source, those that are not defaults first."""
    console = console or Console(soft_wrap=True, highlight=False)
    given = [row for row in resolved.table() if row.source != "default"]
    defaults = [row for row in resolved.table() if row.source == "default"]
    width = max(len(row.name) for row in given)
    console.print("configuration (value, where it comes from):", markup=False)
    for row in given:
        console.print(f"  {row.name:<{width}}  {_shown(row.value)}  ({row.source})", markup=False)
    console.print(
        "  defaults: " + ", ".join(f"{row.name}={_shown(row.value)}" for row in defaults), markup=False
    )
    for note in resolved.notes:
        console.print(f"  note: {note}", markup=False)


def draw_plots(log: Path, images: Path) -> None:
    """Redraw images/*.png (loss, learning rate, gradient norm, evaluation loss) from logging.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, list[tuple[int, float]]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        step = int(entry["iteration"].split("/")[0])
        for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
            if name in entry:
                curves.setdefault(name, []).append((step, entry[name]))
    images.mkdir(exist_ok=True)
    for name, points in curves.items():
        figure, axes = plt.subplots(figsize=(7, 4))
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 30 else None)
        axes.set(xlabel="step", ylabel=name, title=name.replace("_", " "))
        axes.grid(alpha=0.3)
        prefix = "" if name.startswith("eval") else "train_"
        figure.savefig(images / f"{prefix}{name}.png", dpi=100, bbox_inches="tight")
        plt.close(figure)


def _progress_bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _open_board(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _line(step: int, num_steps: int, entry: dict[str, Any]) -> str:
    return (
        f"step {step}/{num_steps}  loss {entry['loss']:.4f}  lr {entry['learning_rate']:.2e}  "
        f"grad norm {entry['grad_norm']:.3f}  {entry['tokens_per_s']:,.0f} tokens/s  "
        f"{entry['elapsed_time']} elapsed, {entry['remaining_time']} left"
    )


def _peak_bytes() -> int:
    """What torch has reserved on the device at most; on the CPU, this process's largest resident size."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "()"
    return str(value).lower() if isinstance(value, bool) else str(value)
