"""From command line words to the texts given for each flag; names are checked here, values are not."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from landfall.errors import UsageError
from landfall.sft.flags.spec import Entry
from landfall.sft.flags.unbuilt import UNBUILT, Unbuilt, asks_for_nothing


@dataclass(frozen=True)
class Given:
    """One flag as the user wrote it: ``--lr 1e-5`` has shown ``--lr`` and texts ``("1e-5",)``."""

    shown: str
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.shown, *self.texts))


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, do="landfall sft --help lists all flags")


class _Record(argparse.Action):
    """Keeps what was given for each name, so that two names of one flag can be compared later."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        shown = _canonical(option_string)
        given: dict[str, Given] = namespace.__dict__.setdefault(self.dest, {})
        given[shown] = Given(shown, tuple(values))


def parse(argv: Sequence[str], entries: Iterable[Entry]) -> dict[str, list[Given]]:
    """What was given for each entry, by the entry's name; one Given for each of its names that was used.

    The last of several uses of one name counts. Raises UsageError for names that are not known, and for
    flags that are not built yet.
    """
    entries = [entry for entry in entries if not entry.flag.env]
    found, extra = _parser(entries).parse_known_args(argv)
    given = {dest: list(by_name.values()) for dest, by_name in vars(found).items()}
    _refuse_unknown(extra, entries)
    _refuse_unbuilt(given)
    return {entry.name: given[entry.name] for entry in entries if entry.name in given}


def option_strings(name: str) -> list[str]:
    """How a flag may be written: ``--max_length`` and ``--max-length``."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _parser(entries: Iterable[Entry]) -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for entry in entries:
        _add(parser, entry.name, (entry.name, *entry.flag.aliases))
    for unbuilt in UNBUILT:
        for name in unbuilt.flags:
            _add(parser, f"unbuilt {name}", (name,))
    return parser


def _add(parser: Parser, dest: str, names: Iterable[str]) -> None:
    """Any number of texts is accepted here: how many there may be is said better with the value's type."""
    options = [option for name in names for option in option_strings(name)]
    parser.add_argument(*options, dest=dest, nargs="*", action=_Record)


def _canonical(option: str) -> str:
    return "--" + option.removeprefix("--").replace("-", "_")


def _refuse_unknown(extra: Sequence[str], entries: Iterable[Entry]) -> None:
    if not extra:
        return
    unknown = [word.partition("=")[0] for word in extra if word.startswith("--")]
    if not unknown:
        raise UsageError("this is not a flag", got=" ".join(extra), do="flags begin with --")
    names = [name for entry in entries for name in (entry.name, *entry.flag.aliases)]
    names += [name for unbuilt in UNBUILT for name in unbuilt.flags]
    lines = [_suggestion(word, names) for word in unknown]
    raise UsageError(
        f"{', '.join(unknown)}: no such flag",
        do=" ".join([*filter(None, lines), "landfall sft --help lists all flags"]),
    )


def _suggestion(word: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(_canonical(word).removeprefix("--"), names, n=1)
    return f"did you mean --{close[0]} for {word}?" if close else ""


def _refuse_unbuilt(given: dict[str, list[Given]]) -> None:
    refused: list[tuple[Given, Unbuilt]] = []
    for unbuilt in UNBUILT:
        for name, passing in unbuilt.flags.items():
            for one in given.get(f"unbuilt {name}", []):
                if not asks_for_nothing(passing, one.texts):
                    refused.append((one, unbuilt))
    if refused:
        raise UsageError(
            f"{', '.join(one.shown for one, _ in refused)}: known, but not built yet",
            got=", ".join(str(one) for one, _ in refused),
            do="\n      ".join(f"{one.shown}: {unbuilt.do}" for one, unbuilt in refused),
        )
