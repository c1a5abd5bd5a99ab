"""Imports torch and transformers in less time. Adapter to how they import what.

transformers marks functions for `torch.compile` and asks whether tensors are sharded; torch checks arguments with its
symbolic shapes, and registers meta operators in Python. That imports torch._dynamo, torch.distributed.tensor, sympy and
torch's decompositions, which take as long as the rest of torch. Here these modules exist, but their code runs only when
code needs an attribute that is not in KNOWN: in other versions that may be sooner, with the same result.

transformers also scans its thousand files for names, as long as the rest of its import. The result is cached as kernels
are, by time and size of every file. A version without that function scans as ever.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from operator import and_, or_
from types import ModuleType
from typing import Any

from kvcpu.vector.compiled import kept_in
from kvservice.kernel_cache import keep, read_kept


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A compiler's decorator that does nothing."""
    return function if function is not None else _unmarked


def _of_numbers(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """The function of this name in torch's symbolic shapes, which is `answer` for plain numbers."""

    def answered(*values: Any) -> Any:
        if _is_plain(values):
            return answer(*values)
        return getattr(_loaded(SHAPES), name)(*values)

    return answered


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return type(value) in (bool, int)


class _NoExpression:
    """Has no instances: there are no symbolic expressions before sympy is loaded."""


COMPILER, SHAPES, SYMBOLS = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"
META = "torch._meta_registrations"
ALONE = {COMPILER: ("_trace_wrapped_higher_order_op",)}  # masks need it; it needs nothing else of the compiler
SAME = (
    "expect_true", "guard_bool", "guard_int", "guard_or_false", "guard_or_true", "guarding_hint_or_throw",
    "guard_size_oblivious", "statically_known_true",
)  # fmt: skip
KNOWN: Mapping[str, Mapping[str, object]] = {
    COMPILER: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _unmarked),
    SHAPES: {
        **{name: _of_numbers(name, lambda value, *_: value) for name in SAME},
        "is_nested_int": _of_numbers("is_nested_int", lambda size: False),
        "has_guarding_hint": _of_numbers("has_guarding_hint", lambda size: True),
        "sym_eq": _of_numbers("sym_eq", lambda a, b: tuple(a) == tuple(b) if isinstance(a, (tuple, list)) else a == b),
        "sym_or": _of_numbers("sym_or", lambda *values: reduce(or_, values)),
        "sym_and": _of_numbers("sym_and", lambda *values: reduce(and_, values)),
    },
    SYMBOLS: {"Basic": _NoExpression},
    META: {},
}


class _Deferred(ModuleType):
    """A module whose code has not run. It has no path, so importing a submodule loads it first."""

    def __getattr__(self, name: str) -> Any:
        if (known := KNOWN[self.__name__].get(name)) is not None:
            return known
        is_special = name.startswith("__") and name.endswith("__") and (name != "__path__" or not _folders(self))
        if is_special or self.__name__ in _loading:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_loaded(self.__name__), name)


_loading: set[str] = set()  # the modules whose code is running


def _folders(module: ModuleType) -> list[str] | None:
    return module.__spec__.submodule_search_locations if module.__spec__ is not None else None


def _loaded(name: str) -> Any:
    module = sys.modules[name]
    spec = module.__spec__
    if isinstance(module, _Deferred) and name not in _loading and spec is not None and spec.loader is not None:
        _loading.add(name)
        load_meta()  # the compiler runs everything on the meta device
        if (folders := _folders(module)) is not None:
            module.__path__ = folders
        try:
            spec.loader.exec_module(module)
        finally:
            _loading.discard(name)
        module.__class__ = ModuleType  # type: ignore[assignment]
    return module


def load_meta() -> bool:
    """Register all meta operators; False if that was done before."""
    if not isinstance(sys.modules.get(META), _Deferred) or META in _loading:
        return False
    _loaded(META)
    return True


def defer_compiler() -> None:
    """Call before torch and transformers are imported. Modules that are imported already stay as they are."""
    if "torch" not in sys.modules and (spec := importlib.util.find_spec("torch")) is not None:
        meta = PathFinder.find_spec(META, spec.submodule_search_locations)
        if meta is not None:
            _defer(META, meta)

    import torch
    import torch.distributed
    from transformers.utils import is_torch_distributed_available

    if META in sys.modules:
        torch._meta_registrations = sys.modules[META]
    for name in KNOWN:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            _defer(name, spec)
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # transformers caches the answer: no model here is sharded
    finally:
        torch.distributed.is_available = is_available


def _defer(name: str, spec: ModuleSpec) -> None:
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    module.__class__ = _Deferred
    for part in ALONE.get(name, ()):
        with suppress(ImportError):
            importlib.import_module(f"{name}.{part}")
    module.__dict__.pop("__path__", None)


MODULE, SCAN = "transformers.utils.import_utils", "create_import_structure_from_path"
LEAST_FILES = 100  # below, a scan is faster than reading a cached result

Scan = Callable[[str], dict[Any, Any]]


def keep_scan() -> None:
    """Call before transformers is imported; afterwards it does nothing."""
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
    """Path, time and size of each source file below it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_mtime_ns, status.st_size
