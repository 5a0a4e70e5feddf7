"""The training run, from flags to the last checkpoint: reads from top to bottom as it happens."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from landfall.errors import LandfallError, SaveError, UsageError
from landfall.sft import cpu, runtime
from landfall.sft.checkpoint import save_checkpoint
from landfall.sft.config import resolve
from landfall.sft.data.batch import MicroBatch
from landfall.sft.data.loader import eval_batches, micro_batches
from landfall.sft.model.step import StepResult, evaluate, train_step
from landfall.sft.model_folder import read_model_config, resolve_model
from landfall.sft.report import Report
from landfall.sft.setup import Run, prepare_run


def train(argv: Sequence[str]) -> None:
    """Run ``landfall sft`` on this rank. Raises LandfallError; returns when the last checkpoint is saved."""
    cpu.install()
    resolved = resolve(argv, os.environ)
    model_folder = resolve_model(resolved.config.model, use_hf=resolved.config.use_hf)
    resolved = resolved.with_model(read_model_config(model_folder, resolved.config.model_type))
    rank = runtime.start(resolved.config)
    with contextlib.closing(rank):
        run = prepare_run(resolved, model_folder, rank)
        try:
            train_steps(run)
        except UsageError as error:  # its exit code is for what was wrong before training
            raise LandfallError(f"Training stopped after step {run.position.step}.\n{error}") from error
        finally:
            with _told_and_survived(run.report, "finishing the log"):
                run.report.close()
    runtime.stop()


def train_steps(run: Run) -> None:
    """Step, log, evaluate and save until done. Nothing else that fails can prevent a save that is due."""
    config, rank = run.config, run.runtime
    batches = micro_batches(
        run.data.train,
        run.stream,
        run.position.step,
        run.num_steps,
        rank.dp_rank,
        rank.dp_size,
        config.micro_batch_size,
        config.num_workers,
    )
    for step, batch in enumerate(batches, start=run.position.step + 1):
        result = train_step(run.ddp, run.trained.optimizer, run.trained.scheduler, batch)
        run.position = msgspec.structs.replace(run.position, step=step)
        with _told_and_survived(run.report, "writing the log"):
            run.report.step(step, _values(result, run), result.num_input_tokens)
        is_last = step == run.num_steps
        if run.data.val is not None and (is_last or step % run.eval_interval == 0):
            with _told_and_survived(run.report, f"the evaluation after step {step}"):
                _evaluate(run, step)
        if is_last or step % config.save_interval == 0:
            _save(run, is_last)


def _evaluate(run: Run, step: int) -> None:
    """Every rank calls it. A rank that fails takes part with nothing, so that no other waits for it; rank 0
    raises LandfallError with what it met."""
    rank, config = run.runtime, run.config
    assert run.data.val is not None
    batches = eval_batches(run.data.val, rank.dp_rank, rank.dp_size, config.micro_batch_size, num_workers=0)
    failure, loss_sum, num_tokens = "", 0.0, 0
    for _ in range(run.num_eval_iters):
        try:
            found = evaluate(run.ddp, [] if failure else _next(batches, config.num_micro_batches))
        except Exception as error:  # this rank's rows or memory
            failure = str(error) if isinstance(error, LandfallError) else traceback.format_exc()
            found = evaluate(run.ddp, [])
        loss_sum, num_tokens = loss_sum + found[0], num_tokens + found[1]
    _raise_what_any_rank_met(run, step, failure)
    run.report.evaluation(step, loss_sum / max(num_tokens, 1), num_tokens)


def _next(batches: Iterator[list[MicroBatch]], num_lists: int) -> list[MicroBatch]:
    return [batch for few in islice(batches, num_lists) for batch in few]


def _raise_what_any_rank_met(run: Run, step: int, failure: str) -> None:
    """On rank 0: it speaks for all."""
    rank = run.runtime
    rank.coordinator.drop(f"evaluation/{step - run.eval_interval}")  # which rank 0 has read long since
    rank.coordinator.post(f"evaluation/{step}", failure.encode())
    if rank.rank == 0:
        told = rank.coordinator.collect(f"evaluation/{step}", range(rank.world_size), rank.session.deadline_s)
        failures = [f"rank {number}: {text.decode()}" for number, text in told.items() if text]
        if failures:
            raise LandfallError("\n".join(failures[:5]))


def _save(run: Run, is_last: bool) -> None:
    """Save, and say so. A save that fails is told, and training goes on to the next, unless it was the last."""
    step, folder = run.position.step, run.folder / f"checkpoint-{run.position.step}"
    started = time.monotonic()
    try:
        manifest = save_checkpoint(
            run.trained, folder, run.config, run.runtime, run.position, run.model_files
        )
    except SaveError as error:
        if is_last:
            raise
        run.report.say(
            f"NOT SAVED at step {step}; training goes on and saves again at the next interval.\n{error}"
        )
        return
    seconds = time.monotonic() - started
    run.report.say(f"saved {folder}: {manifest.num_bytes:,} bytes in {seconds:.2f} s")


def _values(result: StepResult, run: Run) -> dict[str, float]:
    rate = max(group["lr"] for group in run.trained.optimizer.param_groups)
    return {"loss": result.loss, "learning_rate": rate, "grad_norm": result.grad_norm}


@contextlib.contextmanager
def _told_and_survived(report: Report, what: str) -> Iterator[None]:
    """Whatever goes wrong inside is told, and saves are made nevertheless."""
    try:
        yield
    except LandfallError as error:
        report.say(f"FAILED: {what}; saves are not affected.\n{error}")
    except Exception:
        report.say(f"FAILED: {what}; saves are not affected.\n{traceback.format_exc()}")
