"""Why stock fails and ours does not, and what stands for the GPU where there is none."""

from __future__ import annotations

from landfall.repro.outcome import Outcome
from landfall.repro.words import mib

TRIPWIRE = (
    "There is no GPU here, so NCCL's failure is played: the ranks train over gloo behind the tripwire. "
    "While it is armed, gather, scatter, send and receive raise NCCL's error, as on a full GPU; landfall has "
    "to pass a stricter one, which raises at every collective. Times are those of a CPU, and nothing hangs."
)


def cause(outcome: Outcome) -> list[str]:
    """Five sentences or two each, with this run's figure where it has one."""
    roomy = next((result for result in outcome.results if result.step.name == "stock/roomy/save"), None)
    taken = roomy.driver_bytes if roomy is not None and roomy.ok else None
    here = f" (here {mib(taken)})" if taken else ""
    return [
        "Before they write, the ranks of a stock save send their plans to rank 0 as Python objects: "
        "gather_object.",
        "On an NCCL group that is a gather on the GPU. NCCL sets its channels up at their first use, which "
        f"is the first save, with plain cudaMalloc, and never gives them back{here}.",
        "After training and an evaluation torch's caching allocator has reserved the whole card: cudaMalloc "
        'gets nothing, and NCCL says no more than "unhandled cuda error".',
        "The rank that fails raises; the others wait in the collective until a watchdog ends the job. How "
        "much is saved does not matter: weights only, or a tiny model, fail the same way.",
        "landfall's ranks agree by messages in a key-value store on the CPU and copy through host buffers "
        "made at the start: no NCCL call, no byte of device memory, so a full card makes no difference.",
    ]
