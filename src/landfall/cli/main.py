"""The ``landfall`` command: finds the subcommand, and turns errors into messages and exit codes.

0 good, 1 a check or the run failed, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from landfall import __version__
from landfall.errors import LandfallError, UsageError

COMMANDS = {
    "sft": "fine-tune Qwen3-VL; takes the flags of ms-swift's megatron sft",
    "verify": "read a checkpoint and say whether every byte is what was saved",
    "repro": "the reported failure, stock and landfall side by side: saves on a full GPU",
    "demo": "a complete run on this machine: a tiny model, real handwritten digits",
}
"""Each is a module of this package with ``main(argv) -> int``; imported only when it is called."""

HELP = f"""\
landfall {__version__}: fine-tune Qwen3-VL on megatron-core, with checkpoints that always land

usage: landfall COMMAND ...

commands:
{{commands}}
  landfall COMMAND --help says more

example: try it out in a few minutes, with or without a GPU
  landfall demo

example: fine-tune on 8 GPUs. A script for ms-swift works as it is, with landfall for megatron
  NPROC_PER_NODE=8 landfall sft --model Qwen/Qwen3-VL-4B-Instruct --dataset train.jsonl \\
      --max_epochs 1 --micro_batch_size 4 --global_batch_size 128 --save output
  landfall verify output/v0-<time>/checkpoint-100

exit codes: 0 good, 1 a check or the run failed, 2 the input is wrong, 130 interrupted"""


def run() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code and never raises for what a user can do wrong."""
    try:
        return _dispatch(argv)
    except LandfallError as error:
        print(f"landfall: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as stop:  # argparse has printed what is wrong, or its help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("landfall: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `landfall sft --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(argv: Sequence[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="".join(f"  {name:{width}}  {what}\n" for name, what in COMMANDS.items())))
        return 0 if argv else 2
    if command in ("-V", "--version"):
        print(f"landfall {__version__}")
        return 0
    if command not in COMMANDS:
        raise UsageError(
            f"{command}: no such command",
            expected=", ".join(COMMANDS),
            do="landfall --help says what they do",
        )
    return int(importlib.import_module(f"landfall.cli.{command}").main(argv[1:]))
