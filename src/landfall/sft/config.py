"""The configuration of a run: every value, and where each came from.

``resolve`` is the way in. What it returns is complete but for what the model's config.json decides;
``Resolved.with_model`` fills that in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from landfall.errors import UsageError
from landfall.sft import derive
from landfall.sft.derive import Source
from landfall.sft.flags import spec
from landfall.sft.flags.table import SftConfig, entries
from landfall.sft.parse import Given, parse

__all__ = ["Resolved", "Row", "SftConfig", "Source", "entries", "resolve"]


class Row(NamedTuple):
    """One value for printing."""

    group: str
    name: str
    value: Any
    source: Source


@dataclass(frozen=True)
class Resolved:
    """A configuration with the source of each value; ``notes`` are sentences that the user should read."""

    config: SftConfig
    sources: dict[str, Source]
    notes: tuple[str, ...] = ()

    def with_model(self, model_config: Mapping[str, Any]) -> Resolved:
        """The same with what the model's config.json decides: bf16 and max_length, unless they were given."""
        found = derive.from_model(self.config, model_config)
        changed = {name: value for name, value in found.items() if getattr(self.config, name) is None}
        sources: dict[str, Source] = {**self.sources, **dict.fromkeys(changed, "model")}
        return replace(self, config=replace(self.config, **changed), sources=sources)

    def table(self) -> list[Row]:
        """All values in groups, those first that are not defaults."""
        rows = [
            Row(entry.flag.group, entry.shown, getattr(self.config, entry.name), self.sources[entry.name])
            for entry in entries()
        ]
        return sorted(rows, key=lambda row: row.source == "default")

    def to_args_json(self) -> dict[str, Any]:
        """All values, for args.json; tuples become lists."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.config).items()}


def resolve(argv: Sequence[str], environ: Mapping[str, str]) -> Resolved:
    """The configuration that command line and environment stand for. Reads no file.

    Raises UsageError, which names the flag or variable, what it got and what was expected.
    """
    draft = derive.Draft({entry.name: entry.default for entry in entries()})
    for name, given in parse(argv, entries()).items():
        draft.set(name, _value(name, given), "flag", given[0].shown)
    _take_environment(draft, environ)
    derive.complete(draft, environ)
    config = SftConfig(**draft.values)
    derive.check(config, draft)
    return Resolved(config, draft.sources, tuple(draft.notes))


def _take_environment(draft: derive.Draft, environ: Mapping[str, str]) -> None:
    unset = environ.get(derive.UNSET, "").split()
    for entry in entries():
        variable = entry.flag.env
        if variable and variable in environ:
            value = spec.convert(entry, variable, [environ[variable]])
            if variable not in unset:
                draft.set(entry.name, value, "environment", variable)
            elif value != entry.default:
                draft.set(entry.name, value, "derived")


def _value(name: str, given: Sequence[Given]) -> Any:
    """The value of a flag, which may have been given under several of its names."""
    entry = next(entry for entry in entries() if entry.name == name)
    values = [spec.convert(entry, one.shown, one.texts) for one in given]
    if any(value != values[0] for value in values):
        raise UsageError(
            f"{' and '.join(one.shown for one in given)} are one flag",
            got=", ".join(str(one) for one in given),
            expected="the same value, or only one of them",
        )
    return values[0]
