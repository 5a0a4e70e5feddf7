"""Whether stock failed as it is known to fail, and ours did what it promises."""

from __future__ import annotations

from collections.abc import Sequence

from landfall.repro.cases import Action, Room, Writer
from landfall.repro.outcome import About, Check, Failure, Result

COLLECTIVES = (
    "gather_object",
    "all_gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "gather",
    "all_gather",
    "scatter",
    "broadcast",
    "all_reduce",
    "barrier",
)
"""Functions of torch.distributed that a failure may be in."""


def judge(results: Sequence[Result], about: About, damage: Sequence[str], *, on_gpu: bool) -> list[Check]:
    """The checks for the writers that ran. ``damage`` is what verifying our checkpoints found."""
    by_step = {(result.step.writer, result.step.room, result.step.action): result for result in results}
    checks = []
    if ("stock", "full", "save") in by_step:
        checks += _of_stock(by_step, about, on_gpu)
    if ("landfall", "full", "save") in by_step:
        checks += _of_ours([result for result in results if result.step.writer == "landfall"], damage, on_gpu)
    return checks


def collective_of(failure: Failure) -> str:
    """The collective in which a rank failed or hung; the innermost function if it was none."""
    functions = failure.functions
    inside = next((name for name in functions if name in COLLECTIVES), None)
    return inside or (functions[-1] if functions else "its start")


def _of_stock(by_step: dict[tuple[Writer, Room, Action], Result], about: About, on_gpu: bool) -> list[Check]:
    name = f"megatron-core {about.megatron_core}"
    roomy, full = by_step["stock", "roomy", "save"], by_step["stock", "full", "save"]
    first = full.first_failure
    seen = describe_end(full) if first is None else f"{first[1].kind} in {_place(first[1])}"
    failed = [attempt.failure for attempt in full.attempts if attempt.ended == "failed" and attempt.failure]
    expected = any(is_as_reported(failure, about.megatron_core, on_gpu=on_gpu) for failure in failed)
    with_room, without = ("while the GPU has room", "on the full GPU") if on_gpu else _TRIPWIRE
    return [
        Check(f"stock {name} saves {with_room}", roomy.ok, "" if roomy.ok else describe_end(roomy)),
        Check(f"stock {name} fails {without}, in the reported place", expected, seen),
    ]


def _place(failure: Failure) -> str:
    """megatron-core's function and the collective that it called."""
    inside = collective_of(failure)
    callers = [frame.function for frame in failure.frames if "megatron/core/" in frame.file]
    return f"{callers[-1]} > {inside}" if callers and callers[-1] != inside else inside


_TRIPWIRE = ("while the tripwire is not armed", "behind the armed tripwire")


def is_as_reported(failure: Failure, megatron_core: str, *, on_gpu: bool) -> bool:
    """Whether a failure of the stock save is the known one.

    Up to 0.16 on a GPU it may come a step earlier than reported, where objects become CUDA tensors.
    """
    functions = failure.functions
    is_nccl = "NCCL" in failure.message and "cuda error" in failure.message.lower()
    if on_gpu and _version(megatron_core) < (0, 17):
        places = {"determine_global_metadata", "all_gather_object", "gather_object"}
        return bool(places & set(functions)) and (is_nccl or failure.kind == "OutOfMemoryError")
    return {"save_state_dict_async_plan", "gather_object"} <= set(functions) and is_nccl


def describe_end(result: Result) -> str:
    """How a step ended, in a few words."""
    if result.ok:
        return "loaded, bit for bit" if result.step.action == "load" else "saved"
    if (first := result.first_failure) is not None:
        return f"failed: {first[1].kind} in {collective_of(first[1])}"
    if result.ranks("hung"):
        return "hung"
    if result.ranks("not reached"):
        return "not reached"
    if result.ranks("skipped"):
        return "nothing to load"
    return "loaded other bytes than were saved"


def _of_ours(ours: list[Result], damage: Sequence[str], on_gpu: bool) -> list[Check]:
    saves = [result for result in ours if result.step.action == "save"]
    loads = [result for result in ours if result.step.action == "load"]
    saved = all(result.ok for result in saves)
    calls = [result.collectives for result in ours]
    without = "on the full GPU" if on_gpu else "behind the tripwire, armed against every collective"
    bad_save = next((describe_end(result) for result in saves if not result.ok), "")
    bad_load = next((describe_end(result) for result in loads if not result.ok), "")
    checks = [
        Check(
            f"landfall saves {without}, every byte verified",
            saved and not damage,
            bad_save or "; ".join(damage),
        ),
        Check("landfall loads what it saved, bit for bit", all(result.ok for result in loads), bad_load),
        Check(
            f"no {'NCCL call' if on_gpu else 'collective'} between entry and exit of its saves and loads",
            all(call == {} for call in calls),
            "" if all(call == {} for call in calls) else _count(calls),
        ),
    ]
    return checks + ([_of_memory(ours)] if on_gpu else [])


def _of_memory(ours: list[Result]) -> Check:
    taken = [
        amount
        for result in ours
        for amount in (result.driver_bytes, result.reserved_bytes, result.peak_bytes)
    ]
    seen = ["unknown" if amount is None else f"{amount / 2**20:.0f} MiB" for amount in taken if amount != 0]
    none_taken = all(amount is not None and amount <= 0 for amount in taken)
    return Check("no device memory taken, from the driver or torch's allocator", none_taken, ", ".join(seen))


def _count(calls: Sequence[dict[str, int] | None]) -> str:
    if any(call is None for call in calls):
        return "they could not be counted"
    return ", ".join(f"{count} {name}" for call in calls for name, count in (call or {}).items())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
