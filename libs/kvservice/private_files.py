"""Adapter: files and folders that are this user's alone: secrets, and temporary folders of this process.

    TMPDIR/kvf-XXXXXXXX/.owner      locked while the process lives; the kernel unlocks it

A killed process removes nothing: the next one that makes such a folder in this TMPDIR does. Process ids would not tell
dead owners: they are reused, and each container has its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvproto.errors import InvalidRequest

PREFIX = "kvf-"  # short: a socket's path has 107 bytes at most
OWNER = ".owner"


def read_secret(path: Path, field: str) -> str:
    """Without surrounding blanks. Raises InvalidRequest."""
    try:
        text = path.read_text("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field=field) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} holds something else than text", field=field) from None
    if not text:
        raise InvalidRequest(f"{path} is empty", field=field)
    return text


def write_private(path: Path, data: bytes) -> None:
    """Mode 0600; the file appears whole or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_own_folder() -> Path:
    """Mode 0700; it survives a sweep of another process at the same moment. Raises OSError."""
    sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # swept before it was locked
            lock = _lock(folder, os.O_CREAT)
            if os.fstat(lock).st_nlink:
                return folder  # the lock stays open until the process ends
            os.close(lock)


def remove_own_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove this user's folders whose processes are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or locked
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path, flags: int = 0) -> int:
    """Raises OSError for a locked folder, or one without an owner file."""
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
