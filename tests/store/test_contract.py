"""Every store keeps the contract."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from landfall.store.base import Store
from landfall.store.local import LocalStore
from landfall.store.memory import MemoryStore
from landfall.testing.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_put_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("m.json", b"old")

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="m.json"):
        store.put("m.json", b"new")
    assert (tmp_path / "m.json").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


def test_every_created_folder_is_synced_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store = LocalStore(tmp_path / "a" / "b")
    with store.open_write("c/d.bin") as file:
        file.write_at(0, b"x")
        file.finish()
    store.sync()
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert str(folder) in synced
