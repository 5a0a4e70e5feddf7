"""The table of flags as text: for ``landfall sft --help`` and for docs/flags.md.

``python -m landfall.sft.flag_docs > docs/flags.md`` writes the page anew.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby

from landfall.sft.flags.environment import UNUSED_VARIABLES
from landfall.sft.flags.spec import Entry, as_text
from landfall.sft.flags.table import entries
from landfall.sft.flags.unbuilt import UNBUILT, Unbuilt

USAGE = """\
usage: [NPROC_PER_NODE=N] landfall sft --model MODEL --dataset FILE ... --max_epochs N [flags]

Fine-tune Qwen3-VL. Flags, names and defaults are those of ms-swift 3.12's megatron sft, so that its scripts
run as they are, with landfall for megatron; the names of 4.x are accepted too. Dashes may be written for
underscores. A flag is true if it has no value: --bf16 is --bf16 true.

example: 8 GPUs of one node
  NPROC_PER_NODE=8 IMAGE_MAX_TOKEN_NUM=1600 landfall sft \\
      --model Qwen/Qwen3-VL-4B-Instruct --dataset train.jsonl --split_dataset_ratio 0.01 \\
      --freeze_vit false --freeze_aligner false --micro_batch_size 4 --global_batch_size 128 \\
      --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
      --lr 1e-5 --lr_warmup_fraction 0.05 --max_epochs 1 --save output --save_interval 500

example: go on where that run ended
  the same, and --load output/v0-<time>"""

REFUSED = (
    "Flags of ms-swift and Megatron that landfall knows and does not have. They are refused by name, unless "
    "they are given the value that they have anyway."
)

PAGE = """\
# Flags of `landfall sft`

Written by `python -m landfall.sft.flag_docs`; a test keeps it up to date.

Names and defaults are those of ms-swift 3.12's `megatron sft`. *Also* lists further names that are accepted,
those of 4.x among them. `--max_length` may be written `--max-length`. A flag that is given without a value is
true. Giving a flag under two names with different values is an error, and so is a flag that is not listed
here: nothing is ignored silently. The last two columns say whether a flag has an effect on ranks on CPUs and
on GPUs.

A run prints each value with its source: default, flag, environment, model (its config.json), or derived from
other values.
"""

VARIABLES = """\
The launcher also sets, for the ranks:

- `LANDFALL_MODEL_FOLDER`: where it found or put the model.
- `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and more, as torchrun does. A process that has these three is taken for a
  rank, and starts no others: `torchrun ... --no-python landfall sft ...` works too.
- `LANDFALL_UNSET`: which variables of the table were not set by the user.
- `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, unless it is set: the 600 seconds that ranks may take to save and end
  after a signal.

Variables that ms-swift reads for Qwen3-VL and landfall refuses, unless they have their default:

{refused}

Without effect, because they concern videos, which landfall does not train on: {videos}.
"""


def help_text() -> str:
    """What ``landfall sft --help`` prints."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    parts = [USAGE]
    for group, members in _groups():
        parts.append(f"{group}:\n" + "\n".join(_help_of(entry, width) for entry in members))
    names = ", ".join(unbuilt.group for unbuilt in UNBUILT)
    text = f"{REFUSED} docs/flags.md lists them: {names}."
    refused = textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ")
    return "\n\n".join([*parts, f"Known, but not built yet:\n{refused}"])


def flags_markdown() -> str:
    """The page docs/flags.md."""
    parts = [PAGE]
    for group, members in _groups():
        title = "Environment variable" if group == "Environment" else "Flag"
        head = f"| {title} | Also | Default | Meaning | On CPUs | On GPUs |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {group}\n", head, *(_table_row(entry) for entry in members)]) + "\n")
    parts.append(_variables_markdown())
    parts.append("\n".join(["## Known, but not built yet\n", REFUSED + "\n", *map(_unbuilt_row, UNBUILT)]))
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[Entry]]]:
    """The entries by group, in the order of the table."""
    order = list(dict.fromkeys(entry.flag.group for entry in entries()))
    ordered = sorted(entries(), key=lambda entry: order.index(entry.flag.group))
    for group, members in groupby(ordered, key=lambda entry: entry.flag.group):
        yield group, list(members)


def _default(entry: Entry) -> str:
    return entry.flag.default_text or as_text(entry.default)


def _help_of(entry: Entry, width: int) -> str:
    names = ", ".join([entry.shown, *(f"--{alias}" for alias in entry.flag.aliases)])
    default = "needed" if entry.flag.default_text == "needed" else f"default: {_default(entry)}"
    built = " or ".join(as_text(value) for value in entry.flag.built if value is not None)
    head = f"  {names}  {f'{built}, so far' if built else entry.expected}  ({default})"
    body = textwrap.fill(entry.flag.help, width, initial_indent="      ", subsequent_indent="      ")
    return f"{head}\n{body}"


def _table_row(entry: Entry) -> str:
    also = ", ".join(f"`--{alias}`" for alias in entry.flag.aliases)
    default = _default(entry) if entry.flag.default_text else f"`{as_text(entry.default)}`"
    choices = (
        f" One of {', '.join(f'`{choice}`' for choice in entry.flag.choices)}." if entry.flag.choices else ""
    )
    built = ", ".join(f"`{as_text(value)}`" for value in entry.flag.built if value is not None)
    limit = f" So far only {built}." if built else ""
    cells = [
        f"`{entry.shown}`",
        also,
        default,
        entry.flag.help + choices + limit,
        entry.flag.cpu,
        entry.flag.gpu,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _variables_markdown() -> str:
    refused = "\n".join(f"- `{variable.name}`: {variable.do}" for variable in UNUSED_VARIABLES if variable.do)
    videos = ", ".join(f"`{variable.name}`" for variable in UNUSED_VARIABLES if not variable.do)
    return VARIABLES.format(refused=refused, videos=videos)


def _unbuilt_row(unbuilt: Unbuilt) -> str:
    flags = ", ".join(f"`--{name}`" for name in unbuilt.flags)
    return f"- **{unbuilt.group}**: {unbuilt.do}. {flags}"


if __name__ == "__main__":
    print(flags_markdown())
