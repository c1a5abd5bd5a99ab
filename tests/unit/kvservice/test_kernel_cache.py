"""Where compiled kernels are kept, on machines of all kinds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvservice.kernel_cache import results_folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for path in files:
        path.write_text(path.name)
    return files


def test_one_folder_per_source_code(sources: list[Path], tmp_path: Path) -> None:
    folder = results_folder(sources)
    assert folder is not None
    assert folder.is_dir()
    assert folder.parent == tmp_path / "home" / ".cache" / "kvfleet"
    assert results_folder(iter(reversed(sources))) == folder, "the order is not the code's"
    sources[1].write_text("other")
    assert results_folder(sources) != folder


def test_variables_say_where(sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (folder := results_folder(sources)) is not None
    assert folder.parent == tmp_path / "xdg" / "kvfleet"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert results_folder(sources) == tmp_path / "numba"
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_costs_the_cache_only(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    assert (folder := results_folder(sources)) is not None
    assert folder.parent == tmp_path
    assert results_folder(sources) != folder, "it is this process's own"


def test_a_folder_of_somebody_else_is_not_used(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = results_folder(sources)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert results_folder(sources) != first


def test_a_user_without_a_home(sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert (folder := results_folder(sources)) is not None
    assert folder.parent == tmp_path


def test_where_nothing_can_be_written_nothing_is_kept(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert results_folder(sources) is None
