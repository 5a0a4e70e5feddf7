"""From what ``--model`` names to a folder on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from landfall.errors import UsageError

MODEL_TYPE = "qwen3_vl"
FETCHED = "LANDFALL_MODEL_FOLDER"
"""Where the launcher has put the model of a hub, for the ranks that it starts."""

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
ANSWER_WITHIN_S = 12.0
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def resolve_model(name: str, environ: Mapping[str, str] = os.environ, use_hf: bool = False) -> Path:
    """The folder that ``name`` stands for: itself, or a model of a hub, downloaded if it isn't yet.

    Hugging Face is the hub, or ModelScope if its package is installed and not ``use_hf``. Raises
    UsageError if there is no such folder and no such model, within seconds if no hub can be reached.
    """
    folder = Path(name)
    if not folder.is_dir() and environ.get(FETCHED):
        folder = Path(environ[FETCHED])
    if not folder.is_dir():
        folder = _from_hub(name, use_hf)
    if not (folder / "config.json").is_file():
        raise UsageError("the model's folder has no config.json", where=str(folder / "config.json"))
    return folder


def read_model_config(folder: Path, model_type: str | None = None) -> dict[str, Any]:
    """config.json of a Qwen3-VL model. Raises UsageError if it is another's, or not ``model_type``."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("the model's config.json can't be read", where=str(path), got=str(error)) from error
    found = config.get("model_type") if isinstance(config, dict) else None
    for expected, name in ((model_type, "--model_type"), (MODEL_TYPE, "landfall sft")):
        if expected not in (None, found):
            raise UsageError(
                f"the model is not what {name} takes",
                where=str(path),
                got=f"model_type {found}",
                expected=f"model_type {expected}",
            )
    return config


def _from_hub(name: str, use_hf: bool) -> Path:
    if not HUB_ID.fullmatch(name):
        raise UsageError(
            "there is no such model",
            where="tried a folder of this name here; no hub was asked, because this is no id",
            got=name,
            expected="the folder of a model, or the id of one on a hub (owner/name)",
        )
    hub, fetch = ("Hugging Face", _fetch_from_hugging_face)
    if not use_hf and importlib.util.find_spec("modelscope"):
        hub, fetch = ("ModelScope", _fetch_from_modelscope)
    try:
        return fetch(name)
    except OSError as error:
        raise UsageError(
            "the model was not found",
            where=f"tried a folder of this name here, and {hub}: {str(error).splitlines()[0]}",
            got=name,
            expected="the folder of a model, or the id of one on a hub (owner/name)",
            do="without a network, download the model elsewhere and pass its folder",
        ) from error


def _fetch_from_hugging_face(name: str) -> Path:
    import huggingface_hub

    def ask() -> str:
        return str(huggingface_hub.HfApi().model_info(name, timeout=ANSWER_WITHIN_S / 2).id)

    def download(local_files_only: bool) -> str:
        return huggingface_hub.snapshot_download(
            name, allow_patterns=FILES, local_files_only=local_files_only, etag_timeout=ANSWER_WITHIN_S / 2
        )

    return _newest_or_local(ask, download)


def _fetch_from_modelscope(name: str) -> Path:
    def snapshot(files: list[str], local_files_only: bool) -> str:
        from modelscope import snapshot_download  # here, so that a broken installation is reported too

        return str(snapshot_download(name, allow_patterns=files, local_files_only=local_files_only))

    return _newest_or_local(lambda: snapshot(["config.json"], False), lambda local: snapshot(FILES, local))


def _newest_or_local(ask: Callable[[], str], download: Callable[[bool], str]) -> Path:
    """What the hub has now; if it does not answer, what was downloaded before. ``ask`` is a short request."""
    try:
        _within(ANSWER_WITHIN_S, ask)
    except OSError as no_answer:
        try:
            return Path(_as_os_error(lambda: download(True)))
        except OSError:
            raise no_answer from None
    return Path(_as_os_error(lambda: download(False)))


def _within(seconds: float, ask: Callable[[], str]) -> None:
    """Call ``ask``, but wait no longer: name look-ups and retries have no time limit of their own."""
    failure: list[OSError] = []

    def run() -> None:
        try:
            _as_os_error(ask)
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if failure:
        raise failure[0]


def _as_os_error(call: Callable[[], str]) -> str:
    """The hubs' packages raise errors of several HTTP libraries, which have no base in common."""
    try:
        return call()
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
