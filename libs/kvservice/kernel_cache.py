"""Where compiled kernels are kept on disk. Knows no compiler: its users point theirs there.

Compiling takes seconds, so the results are kept. Numba keys what it keeps by the file that a function stands in; the
functions that it calls stand in others, so the folder's name holds a hash over all of them.

A container's image may bring results (KVFLEET_KERNELS names where). Numba keys them by the CPU too, so those of another
kind are merely not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvservice.own_folder import make_own_folder

DIGEST_BYTES = 16


def results_folder(sources: Iterable[Path]) -> Path | None:
    """A folder for what these very files compile to: what NUMBA_CACHE_DIR says, or one in the user's cache, or, where
    there is none that can be written (no home, a read-only image), a new one that this process alone will use. None if
    not even that can be made: everything is compiled anew and nothing kept. A new one begins with what was brought."""
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(told)
    name = _name(sources)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "kvfleet" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (brought := _brought(name)) is not None and not folder.exists():
            _bring(brought, folder)
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    try:
        own = make_own_folder()
        if (brought := _brought(name)) is not None:
            shutil.copytree(brought, own, dirs_exist_ok=True)
        return own
    except OSError:
        return None


def keep(path: Path, data: bytes) -> None:
    """Whole, or not at all: where there is no room it is made again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)
        with open(number, "wb") as file:
            file.write(_digest(data) + data)
        os.replace(name, path)


def read_kept(path: Path) -> bytes | None:
    """What `keep` wrote; None where there is no such file, or not a whole one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[DIGEST_BYTES:] if _digest(data[DIGEST_BYTES:]) == data[:DIGEST_BYTES] else None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _name(sources: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return f"kernels-{digest.hexdigest()}"


def _brought(name: str) -> Path | None:
    """What was compiled beforehand, if that was."""
    told = os.environ.get("KVFLEET_KERNELS")
    return Path(told) / name if told and (Path(told) / name).is_dir() else None


def _bring(brought: Path, folder: Path) -> None:
    """`folder` appears whole, though several processes may start at once."""
    copy = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shutil.copytree(brought, copy, dirs_exist_ok=True)
        copy.rename(folder)
    except OSError:  # another process was faster, or there is no room: then it is compiled
        shutil.rmtree(copy, ignore_errors=True)
