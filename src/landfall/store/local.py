"""Files on a POSIX file system, shared or local."""

from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

from landfall.store.base import Buffer, Room, Store, WriteFile


class LocalFile(WriteFile):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            try:
                written = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            view, offset = view[written:], offset + written

    def finish(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalStore(Store):
    """The folder ``root``. Made by the first file that is written to it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._unsynced: set[Path] = set()

    def describe(self, name: str = "") -> str:
        return str(self.root / name)

    def open_write(self, name: str) -> WriteFile:
        path = self._path(name)
        self._make_folder(path.parent)
        self._unsynced.add(path.parent)
        return LocalFile(path)

    def put(self, name: str, data: Buffer) -> None:
        path = self._path(name)
        self._make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with LocalFile(temporary) as file:
                file.write_at(0, data)
                file.finish()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._unsynced.add(path.parent)
        self.sync()

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self._path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, folder: str = "") -> Iterator[str]:
        for place, _, names in os.walk(self._path(folder)):
            for name in names:
                yield (Path(place) / name).relative_to(self.root).as_posix()

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        os.replace(source, target)
        self._unsynced |= {source.parent, target.parent}

    def remove(self, name: str) -> None:
        path = self._path(name)
        path.unlink(missing_ok=True)
        self._unsynced.add(path.parent)
        folder = path.parent
        while folder != self.root:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass  # another rank was faster
            except OSError:
                return  # not empty
            self._unsynced.discard(folder)
            self._unsynced.add(folder.parent)
            folder = folder.parent

    def room(self) -> Room:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return Room(free_bytes(self.root), None if limit == resource.RLIM_INFINITY else limit)

    def sync(self) -> None:
        while self._unsynced:
            _sync_folder(self._unsynced.pop())

    def _path(self, name: str) -> Path:
        return self.root / name if name else self.root

    def _make_folder(self, folder: Path) -> None:
        """Create a folder and note the parents whose entries changed, for :meth:`sync`."""
        missing = folder
        while not missing.exists():
            self._unsynced.add(missing.parent)
            missing = missing.parent
        folder.mkdir(parents=True, exist_ok=True)


def free_bytes(place: Path) -> int | None:
    """What this process may still write at ``place``, or where it will be made; None if nobody knows."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        stats = os.statvfs(place)
    except OSError:
        return None
    # The share that a file system keeps for root counts where we are root.
    return stats.f_frsize * (stats.f_bfree if os.geteuid() == 0 else stats.f_bavail)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # removed since, and the removal is noted in its parent
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
