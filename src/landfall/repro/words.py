"""How results are told: titles, cells and failures, the same on the terminal and in the Markdown report."""

from __future__ import annotations

from landfall.repro.cases import Step
from landfall.repro.outcome import About, Failure, Frame, Outcome, Result
from landfall.repro.verdict import collective_of

MIB = 1 << 20
NUM_FRAMES = 9
MEMORY = ("GPU memory, for good", "of it torch's", "torch's peak")
"""What the driver gave out and did not get back; the part that torch's allocator holds; the most that it handed
out in between on one rank."""


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
            label: _mib(amount) for label, amount in zip(MEMORY, amounts, strict=True) if amount is not None
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
    named = {"failed": "failed", "died": "died", "hung": "hung"}
    parts = [
        f"{span(result.ranks(ended))} {word}"  # type: ignore[arg-type]
        for ended, word in named.items()
        if result.ranks(ended)  # type: ignore[arg-type]
    ]
    return ", ".join(parts)


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
        failure = result.attempts[hung[0]].failure
        if failure is not None and failure.frames:
            lines += [f"  at {frame}" for frame in telling(failure)]
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
    return (
        f"{outcome.num_ranks} ranks on {cards} ({about.device_bytes / 2**30:.1f} GiB), NCCL {about.nccl}, {software}"
    )


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
    return f"GPU full: torch's caching allocator holds all but {min(free) / MIB:.0f} to {max(free) / MIB:.0f} MiB"


TRIPWIRE = (
    "There is no GPU here, so NCCL's failure is played: the ranks train over gloo behind the tripwire. While it "
    "is armed, gather, scatter, send and receive raise NCCL's error, as on a full GPU; landfall has to pass a "
    "stricter one, which raises at every collective. Times are those of a CPU; nothing can hang."
)


def cause(outcome: Outcome) -> list[str]:
    """Why stock fails and ours does not, in five lines."""
    roomy = next((r for r in outcome.results if r.step.name == "stock/roomy/save" and r.ok), None)
    taken = f" (here {_mib(roomy.driver_bytes)})" if roomy is not None and roomy.driver_bytes else ""
    return [
        "Before they write, the ranks of a stock save send their plans to rank 0 as Python objects: gather_object.",
        "On an NCCL group that is a gather on the GPU. NCCL sets its channels up at their first use, which is the "
        f"first save, with plain cudaMalloc, and never gives them back{taken}.",
        "After training and an evaluation torch's caching allocator has reserved the whole card: cudaMalloc gets "
        'nothing, and NCCL says no more than "unhandled cuda error".',
        "The rank that fails raises; the others wait in the collective until a watchdog ends the job. How much is "
        "saved does not matter: weights only, or a tiny model, fail the same way.",
        "landfall's ranks agree by messages in a key-value store on the CPU and copy through host buffers made at "
        "the start: no NCCL call, no byte of device memory, so a full card makes no difference.",
    ]


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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB"
