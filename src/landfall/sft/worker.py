"""What each rank runs: ``python -m landfall.sft.worker <flags>`` under torchrun, or in the launcher itself."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from landfall.errors import LandfallError
from landfall.sft.quiet import quieten


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code. torchrun's variables are in the environment."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        quieten()
        from landfall.sft.loop import train

        train(argv)
        return 0
    except LandfallError as error:
        # Start-up errors are the same on all ranks (sft.agree): one voice a node is enough.
        # So is the end of a run that was asked to end.
        if error.exit_code == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"landfall sft: rank {rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        print(f"landfall sft: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    # Not sys.exit: after a failure other ranks may be gone, and process groups would wait for them.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
