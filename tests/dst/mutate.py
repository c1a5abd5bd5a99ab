"""Runs the product with one line changed: a patch of `tests/dst/mutations` is applied to the source as it is imported.

A patch is a unified diff of one hunk. Before it stand, as `#` lines, what it breaks, and `# seed N`: one that shows it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_name("mutations")


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str
    told: str  # what it breaks
    seed: int | None
    path: str  # from the repository's root
    before: str
    after: str

    @property
    def module(self) -> str:
        """As it is imported."""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(("kvfleet", *parts[1:]) if parts[0] == "services" else parts[1:])

    def applied(self) -> str:
        """Raises ValueError where the source has changed."""
        source = (ROOT / self.path).read_text()
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.path} has its lines {source.count(self.before)} times")
        return source.replace(self.before, self.after)


def read(name: str) -> Mutation:
    lines = (FOLDER / f"{name}.patch").read_text().splitlines(keepends=True)
    told = [line[2:].strip() for line in lines if line.startswith("# ")]
    seeds = [int(one.removeprefix("seed ")) for one in told if one.startswith("seed ")]
    path = next(line[6:].strip() for line in lines if line.startswith("+++ b/"))
    hunk = lines[next(at for at, line in enumerate(lines) if line.startswith("@@")) + 1 :]
    before = "".join(line[1:] for line in hunk if line[0] in " -")
    after = "".join(line[1:] for line in hunk if line[0] in " +")
    why = " ".join(one for one in told if not one.startswith("seed "))
    return Mutation(name, why, seeds[0] if seeds else None, path, before, after)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


class _Loader(importlib.abc.Loader):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        path = ROOT / self._mutation.path
        module.__file__ = str(path)
        exec(compile(self._mutation.applied(), str(path), "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(self._mutation))


def install(name: str) -> None:
    """Before the product is imported. Raises FileNotFoundError, ValueError."""
    mutation = read(name)
    mutation.applied()
    sys.meta_path.insert(0, _Finder(mutation))
