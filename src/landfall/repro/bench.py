"""One rank's groups, tensors and writers, and how it takes a step and measures it."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from landfall.coord.base import Coordinator
from landfall.coord.tcpstore import TCPStoreCoordinator
from landfall.repro.card import Card, Reading
from landfall.repro.cases import Step
from landfall.repro.diary import Diary, Orders, failure_of
from landfall.repro.listen import Listener
from landfall.repro.outcome import About, Attempt
from landfall.repro.tensors import Tensors, current_device
from landfall.repro.training import Training
from landfall.repro.writers import Saver, make_saver
from landfall.sft import cpu
from landfall.sft.quiet import quieten

MEET_S = 600.0
"""Ranks that fail or hang are stopped from outside, long before."""

_MODULES = (
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)


def import_everything(*, on_gpu: bool) -> None:
    """Load what takes long to load, before it counts. Touches no device."""
    quieten()
    torch.set_num_threads(1)
    cpu.install()
    for module in (*_MODULES, *(() if on_gpu else ("landfall.testing.tripwire",))):
        importlib.import_module(module)


class Bench:
    """What a rank needs for its steps, set up before its card is full."""

    def __init__(
        self, orders: Orders, diary: Diary, coordinator: Coordinator, tensors: Tensors, group: Any
    ) -> None:
        self._on_gpu, self._diary = orders.on_gpu, diary
        self._coordinator, self._tensors = coordinator, tensors
        writers = dict.fromkeys(step.writer for step in orders.launch.steps)
        self._savers = {writer: make_saver(writer, tensors, coordinator, group) for writer in writers}
        self._card = Card(current_device(), fills=_is_first_on_device())
        self._card.keep_spare()
        self._listener = Listener(on_gpu=orders.on_gpu)
        self._num_meetings = 0

    @classmethod
    def set_up(cls, orders: Orders, diary: Diary) -> Bench:
        """Join the other ranks, train a little and evaluate."""
        from megatron.core import parallel_state

        diary.phase("joining")
        if orders.on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl" if orders.on_gpu else "tripwire")
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        coordinator = TCPStoreCoordinator.from_process_group()
        diary.phase("training")
        training = Training(group, current_device())
        losses, eval_loss = training.run()
        if coordinator.rank == 0:
            diary.about(_about(losses, eval_loss))
        return cls(orders, diary, coordinator, Tensors(training), group)

    def take(self, step: Step) -> None:
        """Take one step together with all other ranks, and write down what became of it."""
        self._diary.phase("preparing", step.name)
        saver = self._savers[step.writer]
        source = self._prepare(step, saver)
        if step.action == "load" and not source:
            self._diary.attempt(Attempt(ended="skipped"))
            return
        if self._on_gpu and step.room == "full":
            self._card.fill()
        self._meet()
        before, calls = self._card.read(), self._listener.calls()
        self._diary.phase("reading" if step.action == "load" else "saving", free_bytes=self._free_bytes(step))
        self._meet()
        attempt, loaded = self._try(step, saver, source)
        self._diary.attempt(attempt)
        if attempt.ended == "done":
            self._meet()
        attempt = self._measured(attempt, before, calls)
        if loaded is not None:
            intact = self._tensors.are_as_noted(source, loaded)
            attempt = _with(attempt, intact=intact, source=source)
        self._diary.attempt(attempt)

    def close(self) -> None:
        """Leave, after the last step. Rank 0, which keeps the messages, waits a little for the others."""
        self._coordinator.close()

    def _prepare(self, step: Step, saver: Saver) -> str:
        """Everything about a step that is not to be measured; returns the folder of a load."""
        if step.action == "save":
            if self._coordinator.rank == 0:
                Path(step.folder).mkdir(exist_ok=True)
            self._tensors.restore()
            self._tensors.note_digests(step.folder)
            return step.folder
        self._meet()  # what was saved last is complete on all ranks, or nowhere
        source = next((folder for folder in step.sources if saver.has(folder)), "")
        self._tensors.wipe()
        return source

    def _try(self, step: Step, saver: Saver, folder: str) -> tuple[Attempt, dict[str, torch.Tensor] | None]:
        loaded = None
        started = time.perf_counter()
        try:
            with self._tripwire(step):
                if step.action == "save":
                    saver.save(folder)
                else:
                    loaded = saver.load(folder)
                if self._on_gpu:
                    torch.cuda.synchronize()
        except BaseException as error:  # torch's CheckpointException is no Exception
            seconds = time.perf_counter() - started
            return Attempt(ended="failed", seconds=seconds, at_s=time.time(), failure=failure_of(error)), None
        seconds = time.perf_counter() - started
        return Attempt(ended="done", seconds=seconds, at_s=time.time(), is_final=False), loaded

    def _measured(self, attempt: Attempt, before: Reading | None, calls: Counter[str]) -> Attempt:
        memory = None
        with contextlib.suppress(RuntimeError):  # a device that failed may not answer any more
            memory = self._card.since(before)
        return _with(attempt, memory=memory, collectives=self._listener.since(calls), is_final=True)

    def _tripwire(self, step: Step) -> AbstractContextManager[None]:
        """On the CPU a full card is the armed tripwire; ours passes the strict one."""
        if self._on_gpu or step.room == "roomy":
            return contextlib.nullcontext()
        from landfall.testing.tripwire import armed

        return armed("strict" if step.writer == "landfall" else "nccl")

    def _free_bytes(self, step: Step) -> int:
        return self._card.free_bytes() if self._on_gpu and step.room == "full" else -1

    def _meet(self) -> None:
        """Wait for all ranks, by messages: a barrier would be a collective."""
        self._num_meetings += 1
        self._coordinator.exchange(f"repro/{self._num_meetings}", b"", MEET_S)


def _is_first_on_device() -> bool:
    rank = int(os.environ["LOCAL_RANK"])
    return rank < max(torch.cuda.device_count(), 1)


def _with(attempt: Attempt, **changes: object) -> Attempt:
    return Attempt(**{name: getattr(attempt, name) for name in attempt.__struct_fields__} | changes)


def _about(losses: list[float], eval_loss: float) -> About:
    import megatron.core

    versions = {"torch": str(torch.__version__), "megatron_core": megatron.core.__version__}
    if not torch.cuda.is_available():
        return About(**versions, losses=losses, eval_loss=eval_loss)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return About(
        **versions,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        device=properties.name,
        device_bytes=properties.total_memory,
        num_devices=torch.cuda.device_count(),
        losses=losses,
        eval_loss=eval_loss,
    )
