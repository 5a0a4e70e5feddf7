"""When a save is made in training, what becomes of one that fails, and which checkpoints are kept."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator

from landfall.engine.retain import Policy, retain
from landfall.errors import LandfallError, RanksMissingError, RefusedError, SaveError
from landfall.format.manifest import Manifest
from landfall.sft.checkpoint import save_checkpoint
from landfall.sft.rehearse import checkpoint_bytes
from landfall.sft.report import Report
from landfall.sft.setup import Run

BACK_OFF_S = (1.0, 4.0, 10.0)
"""How long to wait before each further attempt to save."""
METRICS = "landfall_metrics.json"
"""In a run folder: what the evaluations found, by step; it decides which checkpoint is the best."""


class Saver:
    """Saves a run's checkpoints. Every rank has one and calls it at the same steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._saved_step = -1
        self._metrics: dict[int, dict[str, float]] = {}

    def save(self, *, is_last: bool) -> None:
        """Save now, if this step is not saved yet.

        A save that fails is told; then training goes on to the next one as --on_save_error says, unless it
        was the last, or ranks are missing: SaveError is raised then.
        """
        run, step = self._run, self._run.position.step
        if self._saved_step == step:
            return
        started = time.monotonic()
        try:
            manifest = self._attempts()
        except RanksMissingError:
            raise
        except SaveError as error:
            if is_last or run.config.on_save_error == "stop":
                raise
            text = "training goes on and saves again at the next interval"
            run.report.say(f"NOT SAVED at step {step}; {text}.\n{error}")
            return
        self._saved_step = step
        folder, seconds = run.folder / f"checkpoint-{step}", time.monotonic() - started
        run.report.say(f"saved {folder}: {manifest.num_bytes:,} bytes in {seconds:.2f} s")
        self._warn(manifest)
        self.retain()

    def _attempts(self) -> Manifest:
        pauses = BACK_OFF_S if self._run.config.on_save_error == "retry" else ()
        for pause in (*pauses, None):
            try:
                return self._attempt()
            except (RanksMissingError, RefusedError):
                raise
            except SaveError as error:
                if pause is None:
                    raise
                step = self._run.position.step
                self._run.report.say(f"NOT SAVED at step {step}; again in {pause:g} s.\n{error}")
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> Manifest:
        run, step = self._run, self._run.position.step
        folder = run.folder / f"checkpoint-{step}"
        return save_checkpoint(
            run.trained,
            folder,
            run.config,
            run.runtime,
            run.position,
            run.model_files,
            checkpoint_bytes(run.trained, run.config),
        )

    def _warn(self, manifest: Manifest) -> None:
        """Say loudly what is odd about a checkpoint that was saved."""
        if (since := manifest.content.get("unchanged_since")) is not None:
            text = f"no tensor has changed since step {since}: nothing was trained"
            self._run.report.say(f"WARNING: checkpoint-{manifest.step} is like the one before; {text}.")

    def evaluated(self, step: int, loss: float) -> None:
        """Remember what an evaluation found, and keep the best checkpoint accordingly. Rank 0."""
        self._metrics[step] = {"loss": loss}
        path = self._run.folder / METRICS
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._metrics, indent=1) + "\n")
        os.replace(partial, path)
        self.retain()

    def retain(self) -> None:
        """Remove the checkpoints that are not to be kept; after a commit, on rank 0."""
        config = self._run.config
        policy = Policy(config.save_total_limit, config.save_retain_interval)
        if self._run.runtime.rank or policy == Policy():
            return
        with told_and_survived(self._run.report, "removing old checkpoints"):
            for folder in retain(self._run.folder, policy, self._best()):
                self._run.report.say(
                    f"removed {folder}, as --save_total_limit or --save_retain_interval says"
                )

    def _best(self) -> int | None:
        config = self._run.config
        if config.metric_for_best_model is None:
            return None
        name = config.metric_for_best_model.removeprefix("eval_")
        found = {step: values[name] for step, values in self._metrics.items() if name in values}
        sign = -1 if config.greater_is_better else 1
        saved = [step for step in found if (self._run.folder / f"checkpoint-{step}").is_dir()]
        return min(saved, key=lambda step: (sign * found[step], step), default=None)


@contextlib.contextmanager
def told_and_survived(report: Report, what: str) -> Iterator[None]:
    """Whatever goes wrong inside is told, and saves are made nevertheless."""
    try:
        yield
    except LandfallError as error:
        report.say(f"FAILED: {what}; saves are not affected.\n{error}")
    except Exception:
        report.say(f"FAILED: {what}; saves are not affected.\n{traceback.format_exc()}")
