"""Run a program behind the tripwire: ``torchrun -m landfall.testing.tripwire --mode strict -m MODULE ARGS``.

Its CPU process groups train over gloo and fail as NCCL on a full GPU does while a checkpoint is saved or
loaded, and each time a line on stderr says what was called. ``--around MODULE:FUNCTION`` (as often as needed)
arms around other functions than landfall's own save and load.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

import landfall.testing.tripwire as tripwire
from landfall.errors import UsageError

AROUND = ("landfall.engine.save:save", "landfall.engine.load:load")


def main(arguments: Sequence[str]) -> None:
    options, program = _parse(arguments)
    use_tripwire_for_gloo()
    for place in options.around or AROUND:
        arm_around(place, options.mode)
    sys.argv = program
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)


def use_tripwire_for_gloo() -> None:
    """From now on ``init_process_group`` of this process gives the tripwire to who asks for gloo."""
    stock = dist.distributed_c10d.init_process_group

    @functools.wraps(stock)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend not in ("gloo", "cpu:gloo"):
            raise UsageError(
                "The tripwire stands in for gloo on CPU ranks",
                got=f"init_process_group(backend={backend!r})",
                expected="backend='gloo'",
                do="run on CPU ranks, or without the tripwire",
            )
        stock("tripwire", *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def arm_around(place: str, mode: tripwire.Mode) -> None:
    """Replace the function at ``MODULE:FUNCTION``, under every name that a module has for it by now."""
    module_name, _, function_name = place.partition(":")
    stock = getattr(importlib.import_module(module_name), function_name)

    @functools.wraps(stock)
    def behind_tripwire(*args: Any, **kwargs: Any) -> Any:
        before = tripwire.calls_while_armed()
        try:
            with tripwire.armed(mode):
                return stock(*args, **kwargs)
        finally:
            made = dict(tripwire.calls_while_armed() - before) or "no collective call"
            print(f"tripwire: {place} behind {mode}: {made}", file=sys.stderr, flush=True)

    _replace_everywhere(stock, behind_tripwire)


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    root = old.__module__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.partition(".")[0] == root:
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m landfall.testing.tripwire", description=__doc__)
    parser.add_argument("--mode", choices=("nccl", "strict"), default="nccl")
    parser.add_argument("--around", action="append", metavar="MODULE:FUNCTION")
    parser.add_argument("-m", dest="program", required=True, nargs=argparse.REMAINDER, metavar="MODULE ARGS")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("-m needs the module to run")
    return options, options.program


if __name__ == "__main__":
    main(sys.argv[1:])
