"""The folder of compiled kernels on disk. Knows no compiler: its users point theirs there.

Numba keys a function by its own file only; as it calls functions of other files, the folder's name has a hash over all.
A container's image may bring results in KVFLEET_KERNELS; Numba does not find those of another CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvservice.private_files import make_own_folder, write_private

DIGEST_BYTES = 16


def results_folder(sources: Iterable[Path]) -> Path | None:
    """A folder for these sources in NUMBA_CACHE_DIR, or in the user's cache, or, if that cannot be written, a new one
    for this process alone; None if that fails too: nothing is kept. A new one begins with the results of the image."""
    name = _name(sources)
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(told) / name
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
    """The file appears whole, or not at all if there is no room."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, _digest(data) + data)


def read_kept(path: Path) -> bytes | None:
    """What `keep` wrote; None for a missing or damaged file."""
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
    told = os.environ.get("KVFLEET_KERNELS")
    return Path(told) / name if told and (Path(told) / name).is_dir() else None


def _bring(brought: Path, folder: Path) -> None:
    """`folder` appears whole, also when several processes start at once."""
    copy = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shutil.copytree(brought, copy, dirs_exist_ok=True)
        copy.rename(folder)
    except OSError:  # another process was faster, or there is no room: then it is compiled
        shutil.rmtree(copy, ignore_errors=True)
