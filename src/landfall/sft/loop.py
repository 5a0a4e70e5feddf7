"""The training run, from flags to the last checkpoint: reads from top to bottom as it happens."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from landfall.errors import LandfallError, UsageError
from landfall.sft import cpu, runtime
from landfall.sft.config import resolve
from landfall.sft.control import Control, StoppedEarlyError, reason
from landfall.sft.data.batch import MicroBatch
from landfall.sft.data.loader import eval_batches, micro_batches
from landfall.sft.layout import check_layout
from landfall.sft.model.step import StepResult, evaluate, train_step
from landfall.sft.model_folder import read_model_config, resolve_model
from landfall.sft.saving import Saver, told_and_survived
from landfall.sft.setup import Run, prepare_run


def train(argv: Sequence[str]) -> None:
    """Run ``landfall sft`` on this rank. Raises LandfallError; returns when the last checkpoint is saved."""
    cpu.install()
    resolved = resolve(argv, os.environ)
    model_folder = resolve_model(resolved.config.model, use_hf=resolved.config.use_hf)
    model_config = read_model_config(model_folder, resolved.config.model_type)
    resolved = resolved.with_model(model_config)
    check_layout(resolved.config, model_config)
    rank = runtime.start(resolved.config)
    with contextlib.closing(rank):
        run = prepare_run(resolved, model_folder, rank)
        try:
            train_steps(run)
        except UsageError as error:  # its exit code is for what was wrong before training
            raise LandfallError(f"Training stopped after step {run.position.step}.\n{error}") from error
        finally:
            with told_and_survived(run.report, "finishing the log"):
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
    control, saver = Control(rank.coordinator, config.exit_duration_in_mins), Saver(run)
    control.listen()
    for step, batch in enumerate(batches, start=run.position.step + 1):
        result = train_step(run.ddp, run.trained.optimizer, run.trained.scheduler, batch)
        run.position = msgspec.structs.replace(run.position, step=step)
        with told_and_survived(run.report, "writing the log"):
            run.report.step(step, _values(result, run), result.num_input_tokens)
        is_last = control.tick() or step == run.num_steps
        if is_last or step % config.save_interval == 0:
            saver.save(is_last=is_last)  # before anything else that can fail
        if _evaluation_is_due(run, step) and control.exit_code is None:
            with told_and_survived(run.report, f"the evaluation after step {step}"):
                _evaluate(run, step, control, saver)
        if control.exit_code is not None and step < run.num_steps:
            saver.save(is_last=True)  # if the evaluation was cut short
            raise _stopped(control.exit_code, run)


def _stopped(exit_code: int, run: Run) -> StoppedEarlyError:
    step = run.position.step
    place = run.folder / f"checkpoint-{step}"
    what = (
        f"stopped after step {step} of {run.num_steps}, because {reason(exit_code)}; --load {place} goes on"
    )
    return StoppedEarlyError(what, exit_code)


def _evaluation_is_due(run: Run, step: int) -> bool:
    return run.data.val is not None and (step == run.num_steps or step % run.eval_interval == 0)


def _evaluate(run: Run, step: int, control: Control, saver: Saver) -> None:
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
        if control.tick():
            return
    _raise_what_any_rank_met(run, step, failure)
    loss = loss_sum / max(num_tokens, 1)
    run.report.evaluation(step, loss, num_tokens)
    if rank.rank == 0:
        saver.evaluated(step, loss)


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


def _values(result: StepResult, run: Run) -> dict[str, float]:
    rate = max(group["lr"] for group in run.trained.optimizer.param_groups)
    return {"loss": result.loss, "learning_rate": rate, "grad_norm": result.grad_norm}
