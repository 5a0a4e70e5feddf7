"""Plays a rank in the tests of the launcher: says what it got, and ends as the test wants."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path


def main(argv: list[str]) -> int:
    folder, rank = Path(os.environ["STANDIN_DIR"]), int(os.environ["RANK"])
    (folder / f"rank-{rank}.json").write_text(json.dumps({"argv": argv, "environ": dict(os.environ)}))
    if os.environ.get("STANDIN_WAIT"):
        return wait_for_signal(folder, rank)
    how = json.loads(os.environ.get("STANDIN_ENDS", "{}")).get(str(rank), 0)
    if how < 0:
        os.kill(os.getpid(), -how)
    return int(how)


def wait_for_signal(folder: Path, rank: int) -> int:
    """As a trainer does: on SIGTERM write something, and end well."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    (folder / f"ready-{rank}").touch()
    while not told.wait(0.05):
        pass
    (folder / f"saved-{rank}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
