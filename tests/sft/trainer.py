"""``landfall sft`` as its users run it: real ranks, real files, and everything that is left behind."""

from __future__ import annotations

import json
import re
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from landfall.engine.checkpoint import Checkpoint
from landfall.engine.contents import TORCH_DIST
from landfall.engine.load import load
from landfall.format.manifest import NAME
from landfall.format.shards import Shard, whole
from landfall.store.local import LocalStore
from landfall.testing.procs import Ranks, start_ranks

_T = TypeVar("_T")

BASE: dict[str, Any] = {
    "bf16": False,
    "freeze_vit": False,
    "freeze_aligner": False,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-3,
    "log_interval": 1,
    "save_interval": 100,
    "num_workers": 0,
    "recompute_granularity": "none",
    "vit_gradient_checkpointing": False,
}
"""What tests pass unless they say otherwise: everything is trained in float32, and every step is logged."""


@dataclass(frozen=True)
class World:
    """A model folder and rows to train it on, made once; tests read them and write elsewhere."""

    model: Path
    data: Path
    """48 rows, each a question about a picture of 64 x 64 pixels; of every third the answer is long."""
    cache: Path


@dataclass(frozen=True)
class Sft:
    """What a run left behind."""

    exit_codes: list[int]
    outputs: list[str]
    """What each rank wrote to stdout and stderr."""
    save: Path
    folder: Path
    """The run folder, which is ``save`` itself without versions."""

    @property
    def log(self) -> list[dict[str, Any]]:
        return read_log(self.folder)

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        return self.values("loss")

    def values(self, name: str) -> dict[int, float]:
        return {step_of(entry): entry[name] for entry in self.log if name in entry}

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    @property
    def steps_saved(self) -> list[int]:
        return sorted(int(found.name.partition("-")[2]) for found in self.folder.glob("checkpoint-*"))

    @property
    def args(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "args.json").read_text(encoding="utf-8")))


def left_in(save: Path, ranks: Ranks | None = None, exit_codes: Sequence[int] = ()) -> Sft:
    """The newest run in a save folder; ``ranks`` are those that have run, or still do."""
    runs = list(save.glob("v*-*"))
    folder = max(runs, key=lambda run: int(run.name[1:].partition("-")[0])) if runs else save
    outputs = [ranks.output(rank) for rank in range(len(ranks.processes))] if ranks else []
    return Sft(list(exit_codes), outputs, save, folder)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's log so far."""
    log = folder / "logging.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def committed_steps(folder: Path) -> list[int]:
    """Of the checkpoints in a run folder that any reader may trust."""
    return sorted(int(found.parent.name.partition("-")[2]) for found in folder.glob(f"checkpoint-*/{NAME}"))


def step_of(entry: Mapping[str, Any]) -> int:
    return int(entry["iteration"].partition("/")[0])


def flags(world: World, out: Path, given: Mapping[str, Any]) -> list[str]:
    """The command line of BASE with ``given``, whose None leaves a flag out."""
    everything = {"model": world.model, "dataset": world.data, "save": out, **BASE, **given}
    words: list[str] = []
    for name, value in everything.items():
        if value is not None:
            words += [f"--{name}", *map(_word, value if isinstance(value, tuple) else (value,))]
    return words


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def start_sft(
    world: World,
    out: Path,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    entry: Callable[[list[str]], Any] | None = None,
    **given: Any,
) -> Ranks:
    """The trainer on ``ranks`` CPU ranks, as torchrun would have started them; for tests that kill some."""
    environment = {"LANDFALL_CACHE": str(world.cache), "CUDA_VISIBLE_DEVICES": "", **(env or {})}
    return start_ranks(entry or as_rank, ranks, flags(world, out, given), backend_env=environment)


def run_sft(
    world: World, out: Path, ranks: int = 1, timeout_s: float = 120.0, ends_well: bool = True, **given: Any
) -> Sft:
    """The trainer from start to end. ``given`` are flags, and what :func:`start_sft` takes."""
    with start_sft(world, out, ranks, **given) as started:
        run = left_in(Path(given.get("save") or out), started, started.exit_codes(timeout_s))
    if ends_well:
        assert set(run.exit_codes) == {0}, "\n".join([f"exit codes {run.exit_codes}", *run.outputs])
    return run


def wait_for(condition: Callable[[], _T], timeout_s: float = 60.0) -> _T:
    """What ``condition`` returns, once it is true."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.001)
    return found


def as_rank(argv: list[str]) -> None:
    """``python -m landfall.sft.worker``, which ends the process with its exit code."""
    sys.argv[1:] = argv
    runpy.run_module("landfall.sft.worker", run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Watched:
    """What :func:`as_watched_rank` saw in one rank."""

    peak_bytes: int
    """The most memory that tensors took."""
    has_workers: bool
    """Whether it had processes of its own."""
    has_fused_loss: bool


def as_watched_rank(argv: list[str]) -> None:
    """Trains like :func:`as_rank`, and prints what :func:`watched` reads; the run has to go well."""
    from landfall.sft.worker import main

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        assert main(argv) == 0
    events = watch.profiler.kineto_results.events()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen = Watched(
        peak_bytes=_peak_bytes(events),
        has_workers=children.ru_minflt > 0,
        has_fused_loss=any(event.name() == "_FusedLosses" for event in events),
    )
    print(f"WATCHED {json.dumps(asdict(seen))}")


def _peak_bytes(events: Sequence[Any]) -> int:
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def watched(run: Sft) -> Watched:
    """Of rank 0."""
    found = re.search(r"WATCHED (.*)", run.outputs[0])
    assert found is not None, run.outputs[0]
    return Watched(**json.loads(found[1]))


def saved_tensors(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's torch_dist files whose key begins with ``prefix``."""
    opened = Checkpoint(LocalStore(checkpoint))
    records = {key: found[0] for key, found in opened.tensors(TORCH_DIST).items() if key.startswith(prefix)}
    tensors = {
        key: torch.zeros(record.global_shape, dtype=getattr(torch, record.dtype.removeprefix("torch.")))
        for key, record in records.items()
    }
    shards = [Shard(key, tuple(t.shape), whole(tuple(t.shape)), t, (0,)) for key, t in tensors.items()]
    load(shards, opened, TORCH_DIST)
    return tensors


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A jsonl file; a row that is text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def row(question: str, answer: str, *images: Path | str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **({"images": [str(image) for image in images]} if images else {})}


def picture(path: Path, side: int, seed: int) -> Path:
    """A square picture that is not the same for any two seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(seed))
    Image.fromarray(noise.to(torch.uint8).numpy()).save(path)
    return path
