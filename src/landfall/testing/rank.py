"""What one rank of :mod:`landfall.testing.procs` does, in its own process."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def run_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], environment: Mapping[str, str], stem: str
) -> None:
    """Write ``fn(*args)`` to ``{stem}.result`` and exit 0; on error ``{stem}.traceback`` and 1."""
    _die_with_parent()
    os.environ.update(environment)
    _redirect_output(f"{stem}.output")
    with open(f"{stem}.stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        try:
            import torch

            torch.set_num_threads(1)
            result = pickle.dumps(fn(*args))
        except BaseException as error:
            Path(f"{stem}.traceback").write_text(traceback.format_exc())
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                raise
            raise SystemExit(1) from None
        partial = Path(f"{stem}.partial")
        partial.write_bytes(result)
        partial.rename(f"{stem}.result")


def _die_with_parent() -> None:
    """The fork server ends with the test's process; so must its ranks, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
