"""Where compiled kernels are kept on disk. Knows no compiler: whoever compiles points its own there.

Compiling takes seconds, so the results are kept. Numba keys what it keeps by the file that a function stands in; the
functions that it calls stand in others, so the folder's name holds a hash over all of them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def results_folder(sources: Iterable[Path]) -> Path | None:
    """A folder for what these very files compile to: what NUMBA_CACHE_DIR says, or one in the user's cache, or, where
    there is none that can be written (no home, a read-only image), a new one that this process alone will use. None if
    not even that can be made: everything is compiled anew and nothing kept."""
    if told := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(told)
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(sources):
        digest.update(path.read_bytes())
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "kvfleet" / f"kernels-{digest.hexdigest()}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    try:
        return Path(tempfile.mkdtemp(prefix="kvfleet-kernels-"))
    except OSError:
        return None
