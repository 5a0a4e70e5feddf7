"""Every parallel layout against one rank, and every checkpoint in every layout: the table of docs/layouts.md.

    python bench/layouts.py > docs/layouts.md

Real ranks on this machine's CPU, about four minutes on two cores. Exits with 1 if anything differs by more
than it may.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.interop import layouts
from tests.interop.layouts import LAYOUTS, Layout
from tests.sft.model import training

from landfall.testing.procs import run_ranks

STEPS = 20
LIMIT = 1e-5
RECOMPUTES = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "vit_gradient_checkpointing": True,
    },
}


@dataclass(frozen=True)
class Line:
    """One layout's row of the table; differences are the largest of all steps, or of all source layouts."""

    layout: Layout
    losses: dict[str, float]
    """By kind of recomputation."""
    norms: float
    num_different: int
    next_loss: float
    same_export: bool

    @property
    def is_good(self) -> bool:
        largest = max(*self.losses.values(), self.norms, self.next_loss)
        return largest <= LIMIT and not self.num_different and self.same_export


def main() -> int:
    torch.set_num_threads(1)
    expected = steps_of(LAYOUTS["1"], "none")
    with tempfile.TemporaryDirectory() as place:
        saved = {name: save(layout, Path(place, name)) for name, layout in LAYOUTS.items()}
        lines = [measure(layout, expected, saved, Path(place)) for layout in LAYOUTS.values()]
    print(page(lines))
    return 0 if all(line.is_good for line in lines) else 1


def steps_of(layout: Layout, recompute: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, on rows with and without images."""
    tell(f"{layout.name}: {STEPS} steps, recompute {recompute}")
    options = replace(layout.options, **RECOMPUTES[recompute])
    plan = training.Plan(num_steps=STEPS, tied=True, options=options)
    outcome = run_ranks(training.train_as_rank, layout.num_ranks, plan, timeout_s=300)[0]
    return [(step.loss, step.grad_norm) for step in outcome.steps]


def save(layout: Layout, folder: Path) -> tuple[str, float]:
    """The folder that a layout saved, and its loss of the next step."""
    tell(f"{layout.name}: save")
    ranks = run_ranks(layouts.train_and_save, layout.num_ranks, layout, str(folder), True)
    torch.save(layouts.put_together(ranks), folder / "state.pt")
    return str(folder), ranks[0].next_losses[0]


def measure(
    layout: Layout, expected: list[tuple[float, float]], saved: dict[str, tuple[str, float]], place: Path
) -> Line:
    losses, norms = {}, 0.0
    for recompute in RECOMPUTES:
        steps = steps_of(layout, recompute)
        losses[recompute] = max(abs(a[0] - b[0]) for a, b in zip(steps, expected, strict=True))
        norms = max(norms, *(abs(a[1] - b[1]) / b[1] for a, b in zip(steps, expected, strict=True)))
    tell(f"{layout.name}: load what the {len(saved)} layouts saved")
    folders, export = {name: folder for name, (folder, _) in saved.items()}, place / f"export-{layout.name}"
    ranks = run_ranks(layouts.load_each, layout.num_ranks, layout, folders, True, str(export), timeout_s=300)
    found = [(name, one) for rank in ranks for name, one in rank.items()]
    same_export = layouts.exported_files(export) == layouts.exported_files(folders["1"])
    return Line(
        layout,
        losses,
        norms,
        sum(len(one.different) for _, one in found),
        max(abs(one.next_losses[0] - saved[name][1]) for name, one in found),
        same_export,
    )


def page(lines: list[Line]) -> str:
    rows = "\n".join(map(row, lines))
    return f"""# Parallel layouts

Made by `python bench/layouts.py > docs/layouts.md`: a Qwen3-VL with 4 language layers, 3 vision blocks, deepstack
on two levels and a tied embedding, in float32, with the distributed optimizer, on CPU ranks. DP, TP, PP, CP
are data, tensor, pipeline and context parallelism, SP is sequence parallelism.

- **loss**: the largest difference to one rank in {STEPS} steps on rows with and without images, for each kind of
  recomputation. At most {LIMIT:g} is allowed.
- **norm**: the same for the gradient norm, relative.
- **loaded**: how many of the checkpoints of the {len(lines)} layouts were loaded bit for bit, model and
  optimizer, and the largest difference of the next step's loss to that of the layout that saved it.
- **export**: whether the safetensors files of the same weights are byte for byte those that one rank writes.

| layout | ranks | loss | loss, selective | loss, full | norm | loaded | next loss | export |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Not in this table, and tested: stock megatron-core 0.16.1 loads what every layout saved, and what it saved in
DP2, TP2, PP2 and TP2xPP2 (as `fully_reshardable` and as `dp_reshardable`) is loaded bit for bit
(`tests/interop/test_layouts.py`); `landfall sft` itself in every layout (`tests/sft/test_layouts.py`); the
published models 2B to 32B in every layout that divides them, by name and shape, and 4B on TP8xPP2xDP8 by
simulation (`tests/adapters/test_scale.py`).

A pipeline has the same number of layers on every stage, and the first stage at least as many as deepstack has
levels. Tensor parallelism divides attention heads, key-value heads and the feed-forward size. What does not fit
is refused before anything is built, with the nearest sizes that do. `dp_reshardable` checkpoints of stock
megatron-core are read by any number of data-parallel ranks with the same buckets, and by no other tensor- or
pipeline-parallel layout.
"""


def row(line: Line) -> str:
    cells = [
        line.layout.name,
        str(line.layout.num_ranks),
        *(f"{line.losses[recompute]:.1e}" for recompute in RECOMPUTES),
        f"{line.norms:.1e}",
        f"all {len(LAYOUTS)}" if not line.num_different else f"{line.num_different} boxes differ",
        f"{line.next_loss:.1e}",
        "the same" if line.same_export else "DIFFERS",
    ]
    return f"| {' | '.join(cells)} |"


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
