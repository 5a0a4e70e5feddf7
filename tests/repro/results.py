"""Results as a run on 8 ranks that share a GPU would bring them, for tests of what is told about them."""

from __future__ import annotations

from landfall.repro.cases import Action, Room, Step, Writer
from landfall.repro.outcome import About, Attempt, Failure, Frame, Memory, Outcome, Race, Result
from landfall.repro.verdict import judge

MIB = 1 << 20
ABOUT = About("2.11.0", "0.19.2", "2.28.9", "NVIDIA H200", 150_000_000_000, 1, [2.0, 1.8], 1.7)
NCCL_ERROR = "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"


def failure(*functions: str, kind: str = "RuntimeError", message: str = NCCL_ERROR) -> Failure:
    return Failure(kind, message, [Frame("megatron/core/x.py", 10, function) for function in functions])


IN_GATHER = failure("save", "save_state_dict_async_plan", "gather_object", "gather")


def good(
    writer: Writer, room: Room, action: Action, *, taken: int = 0, calls: dict[str, int] | None = None
) -> Result:
    """All 8 ranks got through; together they took ``taken`` bytes."""
    attempt = Attempt(
        ended="done",
        seconds=0.5,
        memory=Memory(0, taken, 0, 0, 0),
        collectives=calls or {},
        intact=True if action == "load" else None,
    )
    return Result(Step(writer, room, action), [attempt] * 8, free_bytes=8 * MIB if room == "full" else -1)


def bad(writer: Writer, room: Room, action: Action, why: Failure = IN_GATHER) -> Result:
    """Rank 3 failed, the others hung."""
    hung = Attempt(ended="hung", failure=failure("save", "broadcast"))
    failed = Attempt(ended="failed", seconds=0.25, at_s=1.0, failure=why, collectives={"nccl:gather": 1})
    return Result(Step(writer, room, action), [hung, hung, hung, failed, hung, hung, hung, hung])


def as_reported() -> list[Result]:
    """What the report says: stock fails on the full card, ours does not."""
    return [
        good("stock", "roomy", "save", taken=486 * MIB, calls={"nccl:gather": 2}),
        good("stock", "roomy", "load", calls={"nccl:all_gather": 5}),
        bad("stock", "full", "save"),
        bad("stock", "full", "load"),
        *(good("landfall", room, action) for room in ("roomy", "full") for action in ("save", "load")),
    ]


def outcome(results: list[Result]) -> Outcome:
    checks = judge(results, ABOUT, [], on_gpu=True)
    return Outcome(
        ok=all(check.holds for check in checks),
        on_gpu=True,
        num_ranks=8,
        about=ABOUT,
        results=results,
        races=[Race("dcp_gloo", [0.3, 0.1, 0.2]), Race("landfall", [0.05, 0.04, 0.06, 0.07])],
        checks=checks,
        seconds=200.0,
        num_bytes=64 * MIB,
    )
