"""Look at a pickle without running it: what it would cost to load, before anything is loaded.

The unpicklers refuse classes that are not on their lists. What they can't refuse are pickles that take the
machine down on the way: memo numbers that make the C unpickler allocate gigabytes, and values nested so deep
that hashing or freeing them overflows the stack.
"""

from __future__ import annotations

import pickletools

from landfall.errors import DamagedError, HostileFileError

MOST_DEPTH = 100
"""A stock ``.metadata`` nests about ten deep."""


def check_pickle(data: bytes, place: str) -> None:
    """Raises HostileFileError for a pickle that is not sane, DamagedError for what is no pickle."""
    limit = len(data)
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "MARK":
                marks.append(len(stack))
            elif name == "MEMOIZE" or "PUT" in name:
                number = len(memo) if name == "MEMOIZE" else int(argument or 0)
                if number > limit:
                    raise _hostile(f"memo number {number:,} in a pickle of {limit:,} bytes", place)
                memo[number] = stack[-1]
            elif "GET" in name:
                stack.append(memo[int(argument or 0)])
            elif name in ("POP", "POP_MARK", "DUP"):
                _simple(name, stack, marks)
            else:
                _push(opcode, stack, marks)
            if stack and stack[-1] > MOST_DEPTH:
                raise _hostile(f"values nested more than {MOST_DEPTH} deep", place)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedError("A pickle can't be read", where=place, got=repr(error)[:200]) from error


def _simple(name: str, stack: list[int], marks: list[int]) -> None:
    if name == "DUP":
        stack.append(stack[-1])
    elif name == "POP_MARK" or (marks and marks[-1] == len(stack)):
        del stack[marks.pop() :]
    else:
        stack.pop()


def _push(opcode: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> None:
    """Take off what an opcode takes, put on what it puts, one deeper than the deepest that it took."""
    taken: list[int] = []
    if pickletools.markobject in opcode.stack_before:
        start = marks.pop()
        taken += stack[start:]
        del stack[start:]
        num_fixed = opcode.stack_before.index(pickletools.markobject)
    else:
        num_fixed = len(opcode.stack_before)
    for _ in range(num_fixed):
        taken.append(stack.pop())
    depth = 1 + max(taken) if taken else 0
    stack.extend([depth] * len(opcode.stack_after))


def _hostile(got: str, place: str) -> HostileFileError:
    return HostileFileError(
        "A pickle would take the process down", where=place, got=got, do="do not load this checkpoint"
    )
