"""The demo from beginning to end: prepare, train with the user's own script, verify, ask."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from landfall.demo.prepare import DemoPaths, prepare

PASSING_SHARE = 0.95


def run(folder: Path, ranks: int) -> int:
    """Run the demo in ``folder`` on ``ranks`` ranks; returns 0 if training, verification and answers are good."""
    with _stage(1, f"prepare a tiny Qwen3-VL and handwritten digits in {folder}"):
        paths = prepare(folder, ranks)
    with _stage(2, f"train: bash {paths.script}"):
        if code := _train(paths):
            print(f"\nThe training ended with exit code {code}; its output above says why.")
            return 1
    from landfall.engine.latest import newest
    from landfall.engine.verify import verify

    with _stage(3, "verify the checkpoint: read every byte back and compare it with its digest"):
        checkpoint = newest(paths.output).folder
        report = verify(checkpoint)
        print("\n".join(report.lines()))
    with _stage(4, "let plain transformers read the held-out digits with the exported safetensors"):
        share = _ask(checkpoint, paths)
    _tell_what_is_where(paths, checkpoint, ranks)
    return 0 if report.ok and share >= PASSING_SHARE else 1


@contextmanager
def _stage(number: int, title: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"\n[{number}/4] {title}", flush=True)
    yield
    print(f"      took {time.monotonic() - started:.0f} s", flush=True)


def _train(paths: DemoPaths) -> int:
    """Run the script as a user would; ``landfall`` is the one of this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return subprocess.run(["bash", str(paths.script)], env={**os.environ, "PATH": path}).returncode


def _ask(checkpoint: Path, paths: DemoPaths) -> float:
    from landfall.demo.answer import answer

    score = answer(checkpoint, paths.test_jsonl)
    for sample in score.samples:
        print(f"      {sample}")
    verdict = (
        "good" if score.share >= PASSING_SHARE else f"less than the {PASSING_SHARE:.0%} that were expected"
    )
    print(f"      {score.right} of {score.total} right ({score.share:.1%}): {verdict}")
    return score.share


def _tell_what_is_where(paths: DemoPaths, checkpoint: Path, ranks: int) -> None:
    iteration = next(checkpoint.glob("iter_*"))
    run_folder = checkpoint.parent
    print(f"""
What is where:
  {paths.script}   the script; edit it and run it again
  {checkpoint}
    *.safetensors, config.json, ...   a Hugging Face model: from_pretrained() takes this folder
    {iteration.name}/   what stock megatron-core reads
    landfall.json   the manifest: the checkpoint exists because this file does
  {run_folder / "logging.jsonl"}, runs/ (tensorboard), images/ (plots)
What to try next:
  landfall verify {checkpoint}
  LR=3e-4 bash {paths.script}
  NPROC_PER_NODE={max(1, ranks // 2)} MICRO_BATCH_SIZE=8 bash {paths.script}   # other ranks, same losses
  bash {paths.script} --load {run_folder} --finetune true   # start from the weights of this run""")
