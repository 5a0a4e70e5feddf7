"""What every store must do, as tests: subclass :class:`StoreContract` and give it a ``store`` fixture."""

from __future__ import annotations

import os
import threading

import pytest

from landfall.store.base import Store


class StoreContract:
    """The promises of ``store/base.py`` that can be seen from one process."""

    def test_written_ranges_make_one_file(self, store: Store) -> None:
        with store.open_write("a/b.bin") as file:
            file.write_at(4, b"5678")
            file.write_at(0, b"1234")
            file.finish()
        assert store.read("a/b.bin") == b"12345678"
        assert store.size("a/b.bin") == 8

    def test_two_writers_of_one_file_keep_each_others_bytes(self, store: Store) -> None:
        def write(number: int) -> None:
            with store.open_write("shared.bin") as file:
                for block in range(number, 40, 2):
                    file.write_at(block * 1000, bytes([block]) * 1000)
                file.finish()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.read("shared.bin") == b"".join(bytes([block]) * 1000 for block in range(40))

    def test_put_replaces_the_whole_file(self, store: Store) -> None:
        store.put("m.json", b"a longer first version")
        store.put("m.json", b"second")
        assert store.read("m.json") == b"second"
        assert list(store.list()) == ["m.json"]

    def test_read_of_a_part_returns_that_part(self, store: Store) -> None:
        store.put("x", bytes(range(100)))
        assert store.read("x", 10, 5) == bytes(range(10, 15))
        into = bytearray(10)
        assert store.read_into("x", 95, memoryview(into)) == 5
        with pytest.raises(EOFError):
            store.read("x", 95, 10)

    def test_missing_file_raises_and_has_no_size(self, store: Store) -> None:
        assert store.size("not/there") is None
        with pytest.raises(FileNotFoundError):
            store.read("not/there")
        store.remove("not/there")

    def test_rename_takes_the_place_of_the_target(self, store: Store) -> None:
        store.put("new", b"new")
        store.put("old", b"old")
        store.rename("new", "old")
        store.sync()
        assert store.read("old") == b"new" and store.size("new") is None

    def test_removed_file_is_gone_from_the_list(self, store: Store) -> None:
        store.put("folder/one", b"1")
        store.put("folder/two", b"2")
        store.remove("folder/one")
        store.sync()
        assert list(store.list()) == ["folder/two"]
        assert list(store.list("folder")) == ["folder/two"]

    def test_names_in_any_script_work(self, store: Store) -> None:
        name = "输出/检查点-🚀/ключ.bin"
        store.put(name, b"x")
        assert list(store.list()) == [name] and os.path.basename(name) in store.describe(name)
