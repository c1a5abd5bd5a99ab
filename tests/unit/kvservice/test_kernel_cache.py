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
    monkeypatch.delenv("KVFLEET_KERNELS", raising=False)
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
    assert results_folder(sources) == tmp_path / "numba" / folder.name, "nor there have other sources its results"
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


@pytest.fixture
def image(sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled beforehand, as in a container's image; the home is as yet empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "build"))
    folder = results_folder(sources)
    assert folder is not None
    (folder / "kernel.nbc").write_text("compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("KVFLEET_KERNELS", str(folder.parent))
    return folder


def test_a_new_folder_begins_with_what_the_image_brought(image: Path, sources: list[Path]) -> None:
    folder = results_folder(sources)
    assert folder is not None
    assert folder != image
    assert (folder / "kernel.nbc").read_text() == "compiled"
    (folder / "kernel.nbc").write_text("for another CPU")
    assert results_folder(sources) == folder
    assert (folder / "kernel.nbc").read_text() == "for another CPU", "what is there stays"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    sources[0].write_text("newer code")
    assert (newer := results_folder(sources)) is not None
    assert list(newer.iterdir()) == []


def test_a_process_without_a_home_has_it_too(image: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    assert (folder := results_folder(sources)) is not None
    assert (folder / "kernel.nbc").read_text() == "compiled"


def test_of_two_that_start_at_once_one_brings_it(
    image: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(copy: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "kernel.nbc").write_text("the other's")
        raise OSError("not empty")

    monkeypatch.setattr(Path, "rename", late)
    assert (folder := results_folder(sources)) is not None
    assert (folder / "kernel.nbc").read_text() == "the other's"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no copy is left behind"
