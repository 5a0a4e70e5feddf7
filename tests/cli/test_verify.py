from __future__ import annotations

import json
from pathlib import Path

import pytest

from landfall.cli.main import main
from landfall.engine.save import save
from landfall.engine.session import solo_session
from landfall.store.local import LocalStore
from tests.engine.conftest import make_contents, make_state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "输出" / "checkpoint-5"
    save(make_contents(make_state()), LocalStore(folder), solo_session(), step=5)
    return folder


def test_whole_checkpoint_is_good(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert "every byte as it was saved" in capsys.readouterr().out

    assert main(["verify", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_changed_byte_fails_the_check(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    assert main(["verify", str(checkpoint), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and file.name in str(report["faults"])


def test_folder_without_checkpoint_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
