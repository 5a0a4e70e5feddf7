"""What one flag is: its meaning, its other names, the values it takes, and where it has an effect."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from landfall.errors import UsageError

YES = {"true", "1", "yes", "on"}
NO = {"false", "0", "no", "off"}
NONE = {"none", "null"}

SAME = "yes"


@dataclass(frozen=True)
class Check:
    """A condition on a value and how to say it."""

    expected: str
    holds: Callable[[Any], bool]


POSITIVE = Check("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = Check("0 or a number above it", lambda value: value >= 0)
COUNT = Check("a whole number from 1 on", lambda value: value >= 1)
COUNT_OR_ZERO = Check("a whole number from 0 on", lambda value: value >= 0)
COUNT_OR_ALL = Check("a whole number from 0 on, or -1 for all", lambda value: value >= -1)
RATIO = Check("a number from 0 to 1", lambda value: 0 <= value <= 1)
SHARE = Check("a number from 0 to below 1", lambda value: 0 <= value < 1)
FOLDER = Check("a folder", lambda value: value != "")
ADDRESS = Check("an address", lambda value: value != "")
MODEL = Check("a folder, or an id of a hub", lambda value: value != "")


@dataclass(frozen=True)
class Flag:
    """All that is known of one field of ``SftConfig`` beyond its type and default."""

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    """Other names, in ms-swift 3.x, 4.x or by habit, without dashes."""
    env: str = ""
    """The environment variable that sets the field; it is no flag then."""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    built: tuple[Any, ...] = ()
    """The values that can be used so far. Other valid ones are refused, with ``do``. Empty: all."""
    do: str = ""
    default_text: str = ""
    """What the default means, where the value alone does not say it."""
    cpu: str = SAME
    """Whether it has an effect on CPU ranks; if not, why."""
    gpu: str = SAME


def flag(group: str, default: Any, help: str, **more: Any) -> Any:
    """A dataclass field for one flag; ``more`` are fields of :class:`Flag`."""
    return field(default=default, metadata={"flag": Flag(group, help, **more)})


@dataclass(frozen=True)
class Kind:
    """The type of a flag's value, read from the field's annotation."""

    base: type
    optional: bool = False
    many: bool = False

    @property
    def name(self) -> str:
        """How a value is called in help and errors."""
        if self.many:
            return "one or more texts"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[self.base]


def kind_of(annotation: Any) -> Kind:
    """``int``, ``int | None`` and ``tuple[str, ...]`` become kinds."""
    if typing.get_origin(annotation) is tuple:
        return Kind(typing.get_args(annotation)[0], many=True)
    if isinstance(annotation, types.UnionType):
        base = next(part for part in typing.get_args(annotation) if part is not type(None))
        return Kind(base, optional=True)
    return Kind(annotation)


@dataclass(frozen=True)
class Entry:
    """One field of the configuration: its name, kind, default and flag."""

    name: str
    kind: Kind
    default: Any
    flag: Flag

    @property
    def shown(self) -> str:
        """The name that users know: ``--lr`` or ``NNODES``."""
        return self.flag.env or f"--{self.name}"

    @property
    def expected(self) -> str:
        """What a value has to be, for messages."""
        if self.flag.choices:
            text = " or ".join(self.flag.choices)
        else:
            text = self.flag.check.expected if self.flag.check else self.kind.name
        return f"{text}, or none" if self.may_be_none else text

    @property
    def may_be_none(self) -> bool:
        """Whether ``none`` can be given. A variable that isn't set needs no word for that."""
        return self.kind.optional and not self.flag.env


def entries_of(config_class: Any) -> list[Entry]:
    """The entries of a dataclass whose fields were made by :func:`flag`, in order."""
    annotations = typing.get_type_hints(config_class)
    entries = []
    for name, a_field in config_class.__dataclass_fields__.items():
        assert a_field.default is not MISSING, name
        entries.append(Entry(name, kind_of(annotations[name]), a_field.default, a_field.metadata["flag"]))
    return entries


def convert(entry: Entry, shown: str, texts: Sequence[str]) -> Any:
    """The value that ``texts`` stand for; ``shown`` is the name that the user wrote.

    Raises UsageError where they are no valid value, or one that is not built yet.
    """
    if entry.kind.many:
        if not texts:
            raise missing_value(shown, entry.expected)
        values: Any = tuple(_single(entry, shown, text) for text in texts)
    else:
        values = _single(entry, shown, _only(entry, shown, texts))
    _refuse_unbuilt(entry, shown, values)
    return values


def missing_value(shown: str, expected: str) -> UsageError:
    return UsageError(
        f"{shown} has no value",
        expected=expected,
        do="give it a value, or leave it out; if the value is a shell variable, it is empty",
    )


def _only(entry: Entry, shown: str, texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    if not texts:
        if entry.kind.base is bool:
            return "true"
        raise missing_value(shown, entry.expected)
    raise UsageError(
        f"{shown} takes one value",
        got=f"{len(texts)} values: {' '.join(map(repr, texts))}",
        expected=entry.expected,
        do="if that is one text with spaces, put it in quotes",
    )


def _single(entry: Entry, shown: str, text: str) -> Any:
    if entry.may_be_none and text.lower() in NONE:
        return None
    value = _parsed(entry.kind.base, text)
    choices, check = entry.flag.choices, entry.flag.check
    if value is None or (choices and value not in choices) or (check and not check.holds(value)):
        raise UsageError(f"{shown} can't have this value", got=repr(text), expected=entry.expected)
    return value


def _parsed(base: type, text: str) -> Any:
    """The value of ``text``, or None if it is none of this type."""
    if base is bool:
        return True if text.lower() in YES else False if text.lower() in NO else None
    if base is str:
        return text
    try:
        value = base(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _refuse_unbuilt(entry: Entry, shown: str, value: Any) -> None:
    built = entry.flag.built
    wrong = [part for part in (value if entry.kind.many else (value,)) if built and part not in built]
    if wrong:
        raise UsageError(
            f"{shown} {as_text(wrong[0])} is known, but not built yet",
            expected=" or ".join(as_text(part) for part in built),
            do=entry.flag.do,
        )


def as_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    if isinstance(value, float):
        return repr(value)
    return "none" if value is None else str(value)
