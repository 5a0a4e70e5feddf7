"""``landfall demo``: a complete run on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Prepare the demo's folder and run it there."""
    parser = argparse.ArgumentParser(
        prog="landfall demo",
        description="Fine-tune a tiny Qwen3-VL to read handwritten digits, with the script that users run: "
        "model, data and script are written to DIR, then the script is started. Works on a CPU.",
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", default="demo", type=Path, help="default: demo")
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="ranks that train together; default: 4"
    )
    parser.add_argument("--prepare", action="store_true", help="only write the files, and start nothing")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 1:
        parser.error(f"--ranks must be 1 or more, not {arguments.ranks}")

    from landfall.demo.prepare import prepare

    prepare(arguments.dir, arguments.ranks)
    if arguments.prepare:
        return 0
    from landfall.demo.run import run

    return int(run(arguments.dir, arguments.ranks))
