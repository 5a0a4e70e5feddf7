"""Make the demo's folder: a tiny Qwen3-VL, handwritten digits and the script that trains one on the other."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from landfall.demo.digits import write_digits
from landfall.demo.model import write_model
from landfall.demo.script import demo_script
from landfall.errors import UsageError

_STATE_FILE = "demo.json"
_VERSION = 1
"""Of what is made here; a folder of another version is made again."""


@dataclass(frozen=True)
class DemoPaths:
    """Where things lie in a demo folder. ``output`` is made by training, all else by :func:`prepare`."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def train_jsonl(self) -> Path:
        return self.data / "train.jsonl"

    @property
    def test_jsonl(self) -> Path:
        return self.data / "test.jsonl"

    @property
    def script(self) -> Path:
        return self.folder / "sft.sh"

    @property
    def output(self) -> Path:
        return self.folder / "输出"


class _State(msgspec.Struct, frozen=True):
    """demo.json: there from the first moment on, so that a half-made folder is known to be ours."""

    version: int
    ranks: int
    """That sft.sh is for; 0 when it is not written yet."""
    file_bytes: dict[str, int]
    """The size of every file in model and data; empty while they are being made."""


def prepare(folder: str | Path, ranks: int) -> DemoPaths:
    """Make what is missing of a demo folder, with a script for ``ranks`` processes.

    A complete folder is left as it is, edits of sft.sh included, unless ``ranks`` is another. A half-made one
    is made again; what training put there stays. UsageError before files are overwritten that the demo did
    not make.
    """
    if ranks < 1:
        raise UsageError("the demo needs at least one rank", got=str(ranks))
    paths = DemoPaths(Path(folder))
    state = _read_state(paths)
    if state is None or not _is_whole(paths, state):
        state = _make_model_and_data(paths)
    if state.ranks != ranks or not paths.script.exists():
        _write(paths.script, demo_script(ranks, paths.output.name).encode(), mode=0o755)
        _write_state(paths, msgspec.structs.replace(state, ranks=ranks))
    return paths


def _make_model_and_data(paths: DemoPaths) -> _State:
    paths.folder.mkdir(parents=True, exist_ok=True)
    _write_state(paths, _State(_VERSION, 0, {}))
    for made in (paths.model, paths.data):
        if made.exists():
            shutil.rmtree(made)
    write_model(paths.model)
    write_digits(paths.data)
    files = [path for made in (paths.model, paths.data) for path in sorted(made.rglob("*")) if path.is_file()]
    state = _State(_VERSION, 0, {str(path.relative_to(paths.folder)): path.stat().st_size for path in files})
    _write_state(paths, state)
    return state


def _is_whole(paths: DemoPaths, state: _State) -> bool:
    """Whether model and data are as they were made, going by the files' sizes."""

    def is_there(name: str, num_bytes: int) -> bool:
        path = paths.folder / name
        return path.is_file() and path.stat().st_size == num_bytes

    return (
        state.version == _VERSION
        and bool(state.file_bytes)
        and all(is_there(name, num_bytes) for name, num_bytes in state.file_bytes.items())
    )


def _read_state(paths: DemoPaths) -> _State | None:
    """None for a folder without demo; UsageError when what lies there has our names but is not ours."""
    path = paths.folder / _STATE_FILE
    if path.exists():
        try:
            return msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.DecodeError as error:
            raise UsageError(
                "this is not the demo's file", where=str(path), do="choose a new folder"
            ) from error
    foreign = [place.name for place in (paths.model, paths.data, paths.script) if place.exists()]
    if foreign:
        raise UsageError(
            "the demo would overwrite files that it did not make",
            where=str(paths.folder),
            got=", ".join(foreign),
            do="choose a new folder",
        )
    return None


def _write_state(paths: DemoPaths, state: _State) -> None:
    _write(paths.folder / _STATE_FILE, msgspec.json.format(msgspec.json.encode(state)) + b"\n", mode=0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file at once, so that a crash leaves the old one or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.chmod(mode)
    os.replace(new, path)
