"""How results are told: titles, cells and failures, the same on the terminal and in the Markdown report."""

from __future__ import annotations

from landfall.repro.cases import ACTIONS, ROOMS, WRITERS, Step
from landfall.repro.outcome import About, Ended, Failure, Frame, Outcome, Result
from landfall.repro.verdict import collective_of

MIB = 1 << 20
NUM_FRAMES = 9
MEMORY = ("GPU memory, for good", "of it torch's", "torch's peak")
"""What the driver gave out and did not get back; the part that torch's allocator holds; the most that it
handed out in between on one rank."""


def blocks(outcome: Outcome) -> list[list[Result]]:
    """What is shown below each other: the results of all writers, side by side, for each room and action."""
    found = [
        [result for result in outcome.results if (result.step.room, result.step.action) == (room, action)]
        for room in ROOMS
        for action in ACTIONS
    ]
    return [sorted(block, key=lambda result: WRITERS.index(result.step.writer)) for block in found if block]


def titles(outcome: Outcome) -> list[str]:
    """The heads of the columns."""
    writers = [result.step.writer for result in blocks(outcome)[0]]
    return [writer_title(writer, on_gpu=outcome.on_gpu, about=outcome.about) for writer in writers]


def full_title(result: Result, outcome: Outcome) -> str:
    """Who did what, where."""
    who = writer_title(result.step.writer, on_gpu=outcome.on_gpu, about=outcome.about)
    return f"{who}: {step_title(result.step, on_gpu=outcome.on_gpu)}"


def writer_title(writer: str, *, on_gpu: bool, about: About | None = None) -> str:
    """A column's head."""
    return {
        "stock": "megatron-core" + (f" {about.megatron_core}" if about else ""),
        "dcp_nccl": "torch DCP, NCCL" if on_gpu else "torch DCP",
        "dcp_gloo": "torch DCP, gloo",
        "landfall": "landfall",
    }[writer]


def step_title(step: Step, *, on_gpu: bool) -> str:
    """What is done and where, for a row."""
    rooms = {"roomy": "GPU has room", "full": "GPU full"}
    if not on_gpu:
        rooms = {"roomy": "tripwire off", "full": "tripwire armed"}
    return f"{step.action}, {rooms[step.room]}"


def verdict(result: Result) -> str:
    """How a step ended, for a cell."""
    if result.ok:
        return "saved" if result.step.action == "save" else "loaded"
    if (first := result.first_failure) is not None:
        return f"FAILED in {collective_of(first[1])}"
    if result.ranks("hung"):
        return "HANGS"
    if result.ranks("skipped"):
        return "nothing to load"
    return "not reached" if result.ranks("not reached") else "DAMAGED"


def facts(result: Result, *, on_gpu: bool) -> dict[str, str]:
    """The rows below the verdict: cells by label. What was not measured is left out."""
    found: dict[str, str] = {}
    if result.ok or result.first_failure:
        found["seconds"] = f"{result.seconds:.2f}"
    if seen := [attempt.intact for attempt in result.attempts if attempt.intact is not None]:
        found["bit for bit"] = "yes" if all(seen) else "NO"
    if on_gpu:
        amounts = (result.driver_bytes, result.reserved_bytes, result.peak_bytes)
        found |= {
            label: mib(amount) for label, amount in zip(MEMORY, amounts, strict=True) if amount is not None
        }
    if result.collectives is not None and (result.ok or result.first_failure):
        found["NCCL calls" if on_gpu else "collectives"] = str(sum(result.collectives.values()))
    if not result.ok and (result.first_failure or result.ranks("hung")):
        found["ranks"] = _ranks(result)
    return found


def labels(rows: list[dict[str, str]]) -> list[str]:
    """The labels that any of ``rows`` has, in the order of a full one."""
    order = ["seconds", "bit for bit", *MEMORY, "NCCL calls", "collectives", "ranks"]
    return [label for label in order if any(label in row for row in rows)]


def _ranks(result: Result) -> str:
    ends: tuple[Ended, ...] = ("failed", "died", "hung")
    return "; ".join(f"{span(result.ranks(end))} {end}" for end in ends if result.ranks(end))


def span(ranks: list[int]) -> str:
    """Ranks as people write them: 0, 2-7."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def trouble(result: Result) -> list[str]:
    """The exception and its place, and where others hang, a line each; nothing where all went well."""
    lines = []
    if (first := result.first_failure) is not None:
        rank, failure = first
        also = [other for other in result.ranks("failed") + result.ranks("died") if other != rank]
        who = f"rank {rank}" + (f" (and {span(sorted(also))})" if also else "")
        lines.append(f"{who}: {failure.kind}: {failure.message.splitlines()[0]}")
        lines += [f"  {line}" for line in failure.message.splitlines()[1:6]]
        lines += [f"  at {frame}" for frame in telling(failure)]
    if hung := result.ranks("hung"):
        lines.append(f"rank {span(hung)}: hung until stopped")
        if (place := result.attempts[hung[0]].failure) is not None:
            lines += [f"  at {frame}" for frame in telling(place)]
    return lines


def telling(failure: Failure) -> list[Frame]:
    """The last frames, without those of this package and of decorators."""
    frames = [
        frame
        for frame in failure.frames
        if not frame.file.startswith("landfall/repro/") and frame.function not in ("wrapper", "inner_func")
    ]
    return (frames or failure.frames)[-NUM_FRAMES:]


def machine(outcome: Outcome) -> str:
    """What ran where."""
    about = outcome.about
    software = f"torch {about.torch}, megatron-core {about.megatron_core}"
    if not outcome.on_gpu:
        return f"{outcome.num_ranks} ranks on the CPU, {software}"
    num_used = min(outcome.num_ranks, about.num_devices)
    cards = f"one {about.device}" if num_used == 1 else f"{num_used} x {about.device}"
    size = f"{about.device_bytes / 2**30:.1f} GiB"
    return f"{outcome.num_ranks} ranks on {cards} ({size}), NCCL {about.nccl}, {software}"


def training(outcome: Outcome) -> str:
    """What was trained and is saved."""
    losses = outcome.about.losses
    return (
        f"trained {len(losses)} steps (loss {losses[0]:.3f} to {losses[-1]:.3f}), evaluated "
        f"({outcome.about.eval_loss:.3f}); {outcome.num_bytes // MIB} MiB to save: weights on all ranks, "
        "momentum split over them"
    )


def free_line(outcome: Outcome) -> str:
    """How full the full card was; empty on a CPU."""
    free = [result.free_bytes for result in outcome.results if result.free_bytes >= 0]
    if not free:
        return ""
    left = " to ".join(dict.fromkeys(mib(amount) for amount in (min(free), max(free))))
    return f"GPU full: torch's caching allocator holds the card, and the driver has {left} left"


def source_line(outcome: Outcome) -> str:
    """What the loads read whose save had failed; empty if there are none."""
    by_name = {result.step.name: result for result in outcome.results}
    loads = [
        result for result in outcome.results if result.step.action == "load" and not result.ranks("skipped")
    ]
    if all(by_name[result.step.name.replace("load", "save")].ok for result in loads):
        return ""
    return "Where a save has failed, the load below it reads what the same writer saved before."


def race_lines(outcome: Outcome) -> list[str]:
    """A heading, and each writer's smallest and median time; nothing if there was no race."""
    if not outcome.races:
        return []
    count, where = len(outcome.races[0].seconds), "GPU full" if outcome.on_gpu else "tripwire armed"
    lines = [f"Time of {count} saves after a first one, in turn in the same processes, {where}:"]
    for race in outcome.races:
        times = sorted(race.seconds)
        title = writer_title(race.writer, on_gpu=outcome.on_gpu)
        lines.append(f"{title}: fastest {times[0]:.3f} s, median {median(times):.3f} s")
    return lines


def median(values: list[float]) -> float:
    """Of a sorted list; the mean of the middle two where their number is even."""
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def mib(num_bytes: int) -> str:
    """As people read it."""
    return f"{num_bytes / MIB:.0f} MiB"
