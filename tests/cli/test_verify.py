from __future__ import annotations

from pathlib import Path

import pytest

from landfall.cli.main import main


def test_folder_without_checkpoint_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
