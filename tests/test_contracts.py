"""Each import rule of pyproject.toml notices what it forbids; `make imports` tells whether they hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = """
import sys
sys.path.insert(0, "src")
from importlinter.cli import lint_imports
sys.exit(lint_imports())
"""


def broken_rules(folder: Path) -> list[str]:
    lint = subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True)
    verdicts = [line for line in lint.stdout.splitlines() if line.endswith((" KEPT", " BROKEN"))]
    assert len(verdicts) == 4, lint.stdout + lint.stderr
    return [line.removesuffix(" BROKEN") for line in verdicts if line.endswith(" BROKEN")]


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("engine/save.py", "from landfall.sft import config", "Imports go one way"),
        ("attic/__init__.py", "", "Imports go one way"),
        ("engine/save.py", "import megatron.core", "megatron-core and transformers stay out"),
        ("cli/main.py", "from megatron.core import parallel_state", "megatron-core only in sft"),
        ("sft/loop.py", "from landfall.testing import procs", "Only repro uses the test tools"),
    ],
)
def test_a_forbidden_import_breaks_its_rule_alone(tmp_path: Path, file: str, line: str, rule: str) -> None:
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / "src" / "landfall" / file
    planted.parent.mkdir(exist_ok=True)
    with planted.open("a") as source:
        source.write(f"\n{line}\n")
    (broken,) = broken_rules(tmp_path)
    assert broken.startswith(rule)
