"""What one rank does: ``python -m landfall.repro.rank FOLDER``, with torchrun's variables in the environment.

Imports little itself: megatron-core's writers start processes that import this module again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from landfall.repro.diary import Diary, read_orders

_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> None:
    """Take the steps of the orders in ``folder``, write the diary, and stay until stdin is closed.

    A rank that failed must not end before the others are seen: its end would change what becomes of them.
    """
    rank = int(os.environ["RANK"])
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    stacks = open(folder / f"{rank}.stacks", "w")  # noqa: SIM115 - for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    diary = Diary(folder / f"{rank}.diary")
    try:
        diary.phase("importing")
        from landfall.repro.bench import Bench, import_everything

        orders = read_orders(folder)
        import_everything(on_gpu=orders.on_gpu)
        diary.phase("ready")
        if not sys.stdin.readline():
            return
        bench = Bench.set_up(orders, diary)
        for step in orders.launch.steps:
            bench.take(step)
        bench.close()
        diary.phase("finished")
    except BaseException as error:
        diary.broken(error)
        traceback.print_exc()
    finally:
        sys.stdin.read()


def _die_with_parent() -> None:
    """A rank that hangs can't see that stdin was closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # process groups would wait for ranks that are gone
