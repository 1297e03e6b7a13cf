"""Lets one writer write at a time, by advisory locks of files. The operating system drops a lock when its process ends,
however it ends. Where there are none (Windows, some network file systems) every writer is taken for the only one."""

import contextlib
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def open_alone(path: Path) -> FileIO | None:
    """Opens a file to append to, unbuffered, as its only writer until it is closed. Returns None where another process,
    or another opening of it in this one, writes to it. A pipe or device may have many writers. Raises OSError."""
    while True:
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        if not _lock(file):
            file.close()
            return None
        if _is_at(file, path):
            return file
        file.close()  # the one that had it has just removed it


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[bool]:
    """Yields whether this is the only writer in the block. Raises OSError. The lock is a file at `path`, which is
    removed afterwards. A file that is replaced as a whole cannot be locked itself."""
    file = open_alone(path)
    if file is None:
        yield False
        return
    with file:
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _lock(file: FileIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
