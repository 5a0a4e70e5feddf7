"""``landfall repro``: the reported failure, stock and ours side by side."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from landfall.errors import UsageError
from landfall.repro.cases import WRITERS

WIDTH = 116
"""Of the table where there is no terminal."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0: stock failed as it is known to, and ours saved, loaded and verified."""
    arguments = _parser().parse_args(argv)
    if arguments.ranks < 2:
        raise UsageError(
            "One rank has nobody to talk to", got=f"--ranks {arguments.ranks}", expected="2 or more"
        )
    if arguments.timeout_s <= 0:
        raise UsageError(
            "A save needs time", got=f"--timeout_s {arguments.timeout_s:g}", expected="more than 0"
        )
    _check_report(arguments.report)
    # torch's store warns with a C++ stack when ranks that hang are ended, which is meant.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    import torch
    from rich.console import Console

    from landfall.repro.conduct import conduct
    from landfall.repro.live import LinesView, TableView
    from landfall.repro.report import to_json, to_markdown
    from landfall.repro.table import show

    stream = sys.stderr if arguments.json else sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH)
    on_gpu = torch.cuda.is_available()
    console.print(_opening(arguments.ranks, on_gpu), markup=False)
    kind = TableView if console.is_terminal else LinesView
    writers = [writer for writer in WRITERS if writer in (arguments.only or WRITERS)]
    signal.signal(signal.SIGTERM, _stop)
    with kind(console, arguments.ranks, on_gpu=on_gpu) as view:
        outcome = conduct(writers, arguments.ranks, arguments.timeout_s, view)
    show(outcome, console)
    if arguments.report is not None:
        command = shlex.join(["landfall", "repro", *argv])
        arguments.report.write_text(to_markdown(outcome, command), encoding="utf-8")
        console.print(f"report: {arguments.report}", markup=False)
    if arguments.json:
        print(json.dumps(to_json(outcome), indent=2, ensure_ascii=False))
    return 0 if outcome.ok else 1


_TIMEOUT_HELP = "how long one save or load may take before its ranks count as hanging; default: 90"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="landfall repro",
        description="Train a little on N ranks, let the GPU fill up, and save: with stock megatron-core, "
        "with torch DCP and with landfall, side by side. N ranks share one GPU, or have one each where there "
        "are N. Without a GPU the same runs on the CPU, behind a stand-in that fails as NCCL does there.",
        epilog="exit codes: 0 stock failed as it is known to and landfall saved, loaded and verified, 1 not "
        "so (with --only: as far as these writers are concerned), 2 the input is wrong",
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--only",
        action="append",
        choices=WRITERS,
        metavar="WRITER",
        help=f"{', '.join(WRITERS)}; may be repeated",
    )
    parser.add_argument("--timeout_s", type=float, default=90.0, metavar="S", help=_TIMEOUT_HELP)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for programs; the rest to stderr"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="also write a Markdown report")
    return parser


def _stop(number: int, frame: FrameType | None) -> None:
    """End as after an interrupt, so that no rank and no file stays behind."""
    raise SystemExit(128 + number)


def _check_report(path: Path | None) -> None:
    """Now, and not after minutes."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(
            "The report can't be written there",
            where=str(path),
            do="name a file in a folder that you may write to",
        )


def _opening(num_ranks: int, on_gpu: bool) -> str:
    where = "the GPU" if on_gpu else "the CPU, behind the tripwire"
    what = "the reported failure, stock and landfall side by side"
    return f"landfall repro: {what}, {num_ranks} ranks on {where}"
