"""Compiled functions: where the results of compiling are kept, and on which threads they run."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding
from numba import carray

from kvcpu.vector import compiled, team
from kvcpu.vector.cells import take_ticket
from kvcpu.vector.compiled import CompiledEntry, entry

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("vector", "attention")  # of the sources
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
import numba
import numpy as np
from kvcpu.vector import compiled
from kvcpu.vector.cells import take_ticket

compiled.SOURCES = Path({sources!r})

def add_one(block):
    take_ticket(numba.carray(block, (1,), np.int64)[0])

if __name__ == "__main__":
    import ctypes
    number = ctypes.c_int64(41)
    one = compiled.entry("__main__", "add_one")
    block = ctypes.c_int64(ctypes.addressof(number))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(one.address)(ctypes.addressof(block))
    print(number.value, int(not compiled.compiled), compiled.kept_in())
"""


class Place:
    """A program of its own, the sources that its results hang on, and the variables it is run with."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.sources = folder / "sources"
        self.program = folder / "program.py"
        for kernels in FOLDERS:
            (self.sources / kernels).mkdir(parents=True)
            (self.sources / kernels / "loops.py").write_text("one = 1\n")
        self.program.write_text(PROGRAM.format(repository=str(REPOSITORY), sources=str(self.sources)))

    def run(self, **variables: str) -> tuple[int, Path]:
        """How many results came from the cache, and where that is."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR")
        }
        done = subprocess.run(
            [sys.executable, str(self.program)],
            env=kept | {"HOME": str(self.home)} | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        number, hits, folder = done.stdout.split(maxsplit=2)
        assert number == "42"
        return int(hits), Path(folder.strip())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_results_are_kept_per_source_code(place: Place) -> None:
    hits, folder = place.run()
    assert hits == 0
    assert folder.parent == place.home / ".cache" / "kvfleet"
    assert list(folder.glob("*.o"))
    assert place.run() == (1, folder)
    folders = {folder}
    for kernels in FOLDERS:
        (place.sources / kernels / "loops.py").write_text("one = 2\n")
        hits, other = place.run()
        assert hits == 0
        assert other.parent == folder.parent
        assert other not in folders
        folders.add(other)


def test_what_is_not_whole_is_compiled_again(place: Place) -> None:
    _, folder = place.run()
    (kept,) = folder.glob("*.o")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], whole[:3000] + b"?" + whole[3001:]):
        kept.write_bytes(damaged)
        assert place.run() == (0, folder)
        assert place.run() == (1, folder)
    assert list(folder.iterdir()) == [kept]


def test_code_that_calls_what_is_not_there_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLVM would end the process that loads it."""
    monkeypatch.setattr(compiled, "kept_in", lambda: tmp_path)
    monkeypatch.setattr(binding, "address_of_symbol", lambda name: None)
    made = entry.__wrapped__(__name__, "take_seat")
    assert made.address == made.keep.address
    assert not list(tmp_path.iterdir())


def test_all_that_is_compiled_counts() -> None:
    """What numba compiles for a worker lies among the sources that results are kept by, and they take nothing else."""
    for path in (REPOSITORY / "services" / "worker").rglob("*.py"):
        assert not re.search(r"^(from|import) numba", path.read_text(), re.MULTILINE), path
    for path in compiled.SOURCES.rglob("*.py"):
        assert "kvfleet" not in re.findall(r"^from (\w+)", path.read_text(), re.MULTILINE), path


def test_the_users_variables_say_where(place: Place, tmp_path: Path) -> None:
    _, folder = place.run(XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert folder.parent == tmp_path / "xdg" / "kvfleet"
    _, folder = place.run(NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    assert folder.parent == tmp_path / "numba"
    assert list(folder.glob("*.o"))
    assert not place.home.exists()


def test_a_home_that_cannot_be_written_costs_the_cache_only(place: Place, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    hits, folder = place.run(HOME="/proc", TMPDIR=str(tmp_path / "temporary"))
    assert hits == 0
    assert folder.parent == tmp_path / "temporary"
    shutil.rmtree(folder)


def test_a_user_without_a_home_loses_the_cache_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an unknown user id without HOME."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = compiled.kept_in.__wrapped__()
    assert folder is not None
    assert folder.parent == tmp_path


# ---------------------------------------------------------------------------------------------- threads


def take_seat(block: Any) -> None:
    take_ticket(carray(block, (1,), np.int64)[0])


@pytest.fixture(scope="module")
def seats() -> CompiledEntry:
    return entry(__name__, "take_seat")


def callers(seats: CompiledEntry, threads: int) -> int:
    """How often a function ran that was given to a team of `threads`."""
    taken = ctypes.c_int64(0)
    block = ctypes.c_int64(ctypes.addressof(taken))
    team.run(seats.address, ctypes.addressof(block), threads)
    return taken.value


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP runtime is another there")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_function_runs_once_on_each_thread(threads: int, seats: CompiledEntry) -> None:
    assert callers(seats, threads) == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_without_an_openmp_runtime_it_runs_on_the_calling_thread(
    threads: int, seats: CompiledEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_fork", lambda: None)
    assert callers(seats, threads) == 1


def test_libraries_that_have_no_such_entry_point_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libraries = [Path("/no/such/libgomp.so"), Path(ctypes.util.find_library("c") or "libc.so.6")]
    monkeypatch.setattr(team, "_openmp_libraries", lambda: libraries)
    monkeypatch.setattr(team, "_runtime", team._runtime.__wrapped__)
    assert team._fork.__wrapped__() is None
    assert team.barrier() == 0
    assert "one thread" in caplog.text
