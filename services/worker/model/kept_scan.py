"""Keeps what transformers finds out about itself at each import. Adapter to how it does.

It reads all its thousand files for the names in them, which takes as long as the rest of its import. The result is kept
as kernels are, by the time and size of every file. Another version that has no such function reads them as ever.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from kvcpu.vector.compiled import kept_in
from kvservice.kernel_cache import keep, read_kept

MODULE, SCAN = "transformers.utils.import_utils", "create_import_structure_from_path"
LEAST_FILES = 100  # a model's own folder is read sooner than what was kept of it

Scan = Callable[[str], dict[Any, Any]]


def keep_scan() -> None:
    """Before transformers is imported; afterwards it changes nothing."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan = getattr(module, SCAN, None)
        if scan is not None:
            setattr(module, SCAN, lambda path: _kept(module, scan, path))


def _kept(module: ModuleType, scan: Scan, path: str) -> dict[Any, Any]:
    setattr(module, SCAN, scan)  # it calls itself by this name
    try:
        files = sorted(_files(path if os.path.isdir(path) else os.path.dirname(path)))
        folder = kept_in() if len(files) >= LEAST_FILES else None
        if folder is None:
            return scan(path)
        digest = hashlib.blake2b(repr((sys.version, files)).encode(), digest_size=8).hexdigest()
        kept = folder / f"{SCAN}-{digest}"
        if (data := read_kept(kept)) is None:
            keep(kept, data := marshal.dumps(scan(path)))
        found: dict[Any, Any] = marshal.loads(data)
        return found
    finally:
        setattr(module, SCAN, lambda path: _kept(module, scan, path))


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, time and size of each below it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_mtime_ns, status.st_size
