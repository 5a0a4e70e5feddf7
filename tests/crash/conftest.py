"""Kills are about order, not about power cuts: the crash tests save into memory where they can."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="landfall-crash-", dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
