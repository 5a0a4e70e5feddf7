"""``landfall verify``: is every byte of a checkpoint what was saved?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Exit code 0: it is, 1: it is not."""
    parser = argparse.ArgumentParser(
        prog="landfall verify",
        description="Read a whole checkpoint and compare it with the digests that were written with it. "
        "Needs neither a GPU nor megatron-core.",
        epilog="exit codes: 0 every byte is as it was saved, 1 it is not, 2 there is no checkpoint at PATH",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint-N folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    arguments = parser.parse_args(argv)

    from landfall.engine.verify import verify

    report = verify(arguments.path)
    print(
        json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
        if arguments.json
        else "\n".join(report.lines())
    )
    return 0 if report.ok else 1
