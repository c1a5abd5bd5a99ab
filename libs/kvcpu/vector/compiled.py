"""Python functions to C functions that threads outside of Python can run. Adapter to Numba and LLVM.

Compiling takes seconds, so `kvservice.kernel_cache` keeps the machine code. Loading takes milliseconds and LLVM alone;
Numba, which costs a process half a second and 60 MB, is imported only to compile.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
from llvmlite import binding

from kvservice.kernel_cache import keep, read_kept, results_folder

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[1]  # all of kvcpu is compiled, or says how
compiled: list[str] = []  # by this process, for those who show what it does
HELPERS = {"numba_": "numba._helperlib", "NRT_": "numba.core.runtime._nrt_python"}  # by the prefix of what is in them


@dataclass(frozen=True, slots=True)
class CompiledEntry:
    """A C function `void f(int64_t *call_block)`, which lives as long as this."""

    address: int
    keep: object


@cache
def entry(module: str, function: str) -> CompiledEntry:
    """The function, from the cache or compiled now, which imports its module and takes seconds."""
    folder = kept_in()
    path = folder / f"{module}.{function}-{_key(module)}.o" if folder is not None else None
    if path is not None and (kept := read_kept(path)) is not None:
        symbol, _, code = kept.partition(b"\0")
        return _load(symbol.decode(), code)
    made = _compile(module, function)
    if path is None or not _calls_known(made):  # another version of Numba: what it made stays in this process
        return CompiledEntry(made.address, made)
    _, _, (code, _) = made._library.serialize_using_object_code()
    keep(path, made.native_name.encode() + b"\0" + code)
    return _load(made.native_name, code)


@cache
def multiplies_pairs() -> bool:
    """Whether this processor multiplies bfloat16. Machine code is cached per processor, so emitters may ask."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


@cache
def kept_in() -> Path | None:
    """The folder of what was compiled from these sources, and of other results that a start would wait for."""
    return results_folder(SOURCES.rglob("*.py"))


@cache
def _key(module: str) -> str:
    """A digest of everything that the code depends on beside `SOURCES`."""
    spec = find_spec(module) if module not in sys.modules else None
    source = spec.origin if spec is not None else sys.modules[module].__file__
    made = (binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())
    digest = hashlib.blake2b(repr((*made, version("numba"), llvmlite.__version__)).encode(), digest_size=8)
    digest.update(Path(source or "").read_bytes())
    return digest.hexdigest()


def _compile(module: str, function: str) -> Any:
    from numba import cfunc, types

    made = cfunc(types.void(types.voidptr))(getattr(import_module(module), function))
    compiled.append(f"{module}.{function}")
    return made


def _calls_known(made: Any) -> bool:
    """Whether another process finds all that its code calls. LLVM ends one that does not."""
    _add_helpers()
    called = [one.name for one in made._library._final_module.functions if one.is_declaration]
    helpers = [name for name in called if name.startswith(tuple(HELPERS))]
    missing = [name for name in helpers if not binding.address_of_symbol(name)]
    if missing:
        log.info("compiled code that calls %s is not kept", ", ".join(missing))
    return not missing


def _load(symbol: str, code: bytes) -> CompiledEntry:
    """Load into an engine of its own, as names of inlined functions are unique within one process only."""
    _add_helpers()
    target = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return CompiledEntry(engine.get_function_address(symbol), engine)


@cache
def _add_helpers() -> None:
    """What compiled code calls of Numba's own C code: its two extension modules, without the package."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for prefix, name in HELPERS.items():
        for helper, address in _extension(name).c_helpers.items():
            binding.add_symbol(helper if helper.startswith("_") else prefix + helper, address)


def _extension(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    package, *folders, last = name.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.joinpath(*folders)
    file = next(path for suffix in EXTENSION_SUFFIXES if (path := folder / (last + suffix)).exists())
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
