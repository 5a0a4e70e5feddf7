"""Every error that landfall raises on purpose, with the exit code it means.

A message says what went wrong, where (rank, step, path, tensor, line), what was found and what was
expected, and what to do next. Exit codes: 1 a run or a check failed, 2 the input is wrong.
"""

from __future__ import annotations


class LandfallError(Exception):
    """The base of all errors. ``str()`` is the whole message, one fact a line."""

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", got: str = "", expected: str = "", do: str = ""
    ) -> None:
        self.what, self.where, self.got, self.expected, self.do = what, where, got, expected, do
        facts = [("where", where), ("got", got), ("expected", expected), ("do", do)]
        super().__init__("\n".join([what] + [f"  {name}: {fact}" for name, fact in facts if fact]))


class UsageError(LandfallError, ValueError):
    """Flags, environment, or files that the user named can't be used as they are."""

    exit_code = 2


class DataError(UsageError):
    """A row of a dataset can't be used. ``where`` names file and line."""


class CheckpointError(LandfallError):
    """A checkpoint can't be read."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""

    exit_code = 2


class DamagedError(CheckpointError):
    """Bytes on disk are not the bytes that were saved. ``where`` names file, tensor and offset."""


class HostileFileError(CheckpointError):
    """A file asks for more than a checkpoint may: to run code, to leave its folder, absurd lengths."""


class SaveError(LandfallError):
    """A save did not commit; what was committed before is untouched."""


class RefusedError(SaveError):
    """A save that would not be right was refused: trying again changes nothing."""


class RanksMissingError(SaveError):
    """A save did not commit because ranks gave no sign of life in time. ``missing`` are their ranks."""

    def __init__(self, what: str, *, missing: tuple[int, ...] = ()) -> None:
        self.missing = missing
        super().__init__(what)


class DeadlineError(LandfallError, TimeoutError):
    """Other ranks did not answer in time. ``missing`` are their ranks."""

    def __init__(self, what: str, *, missing: tuple[int, ...] = (), where: str = "", do: str = "") -> None:
        self.missing = missing
        super().__init__(what, where=where, got=f"no answer from rank {', '.join(map(str, missing))}", do=do)
