from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from landfall.errors import UsageError
from landfall.sft import model_folder
from landfall.sft.model_folder import FETCHED, read_model_config, resolve_model


def model_in(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **config}))
    return folder


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(model_in(tmp_path / "模型")), {}) == tmp_path / "模型"


def test_folder_without_config_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="config.json") as caught:
        resolve_model(str(tmp_path), {})
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such/folder", "./a/b", "a/b/c", "-a/b"])
def test_name_that_is_no_id_is_refused_without_asking_a_hub(name: str) -> None:
    with pytest.raises(UsageError, match="no hub was asked"):
        resolve_model(name, {})


def test_rank_takes_the_folder_that_the_launcher_found(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "snapshot")
    assert resolve_model("Qwen/Qwen3-VL-4B-Instruct", {FETCHED: str(folder)}) == folder


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hugging Face is a server that accepts connections and never answers; the cache is empty."""
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_folder, "ANSWER_WITHIN_S", 1.0)
    yield
    server.close()


@pytest.mark.usefixtures("silent_hub")
def test_hub_that_does_not_answer_is_given_up_soon() -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError) as caught:
        resolve_model("Qwen/Qwen3-VL-4B-Instruct", {}, use_hf=True)
    assert time.monotonic() - begin < 5
    assert "Hugging Face" in str(caught.value)
    assert "Qwen/Qwen3-VL-4B-Instruct" in str(caught.value)


@pytest.mark.usefixtures("silent_hub")
def test_model_downloaded_before_is_used_when_the_hub_does_not_answer(tmp_path: Path) -> None:
    stored = tmp_path / "cache" / "models--owner--name"
    folder = model_in(stored / "snapshots" / ("a" * 40))
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("a" * 40)
    assert resolve_model("owner/name", {}, use_hf=True) == folder


def test_config_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="model_type llama"):
        read_model_config(model_in(tmp_path, model_type="llama"))


def test_config_that_contradicts_the_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model_type takes"):
        read_model_config(model_in(tmp_path), "qwen2_5_vl")


def test_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="can't be read"):
        read_model_config(tmp_path)
