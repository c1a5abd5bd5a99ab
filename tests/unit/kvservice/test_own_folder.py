"""Folders of a process under the system's temporary one: gone with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice import private_files
from kvservice.private_files import make_own_folder, remove_own_folder, sweep

OTHER = "from kvservice.private_files import make_own_folder; print(make_own_folder(), flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process and its folder, with something in it."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "deeper").mkdir()
        (folder / "deeper" / "w0.sock").touch()
        yield process, folder
        process.kill()


def test_it_is_this_users_alone_and_has_a_short_name(temporary: Path) -> None:
    folder = make_own_folder()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(folder.name) <= 12
    assert make_own_folder() != folder
    remove_own_folder(folder)
    assert not folder.exists()


def test_of_a_process_that_lives_it_stays_and_of_one_that_was_killed_it_goes(
    other: tuple[subprocess.Popen[str], Path],
) -> None:
    process, folder = other
    own = make_own_folder()
    assert folder.is_dir()
    process.kill()
    process.wait()
    assert folder.is_dir(), "it had no time"
    later = make_own_folder()
    assert not folder.exists()
    assert own.is_dir()
    assert later.is_dir()


def test_what_is_not_of_this_kind_stays(temporary: Path) -> None:
    (temporary / "kvf-mine").mkdir()
    (temporary / "kvf-file").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".owner").touch()
    (temporary / "kvf-link").symlink_to(elsewhere)
    sweep()
    assert {path.name for path in temporary.iterdir()} == {"kvf-mine", "kvf-file", "kvf-link", "elsewhere"}
    assert (elsewhere / ".owner").exists()


def test_one_that_is_swept_before_it_is_locked_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    lock = private_files._lock

    def late(folder: Path, flags: int = 0) -> int:
        if flags:
            made.append(folder)
        if len(made) == 1:
            (folder / ".owner").touch()
            sweep_once()
        return lock(folder, flags)

    def sweep_once() -> None:
        monkeypatch.setattr(private_files, "_lock", lock)
        sweep()
        monkeypatch.setattr(private_files, "_lock", late)

    monkeypatch.setattr(private_files, "_lock", late)
    folder = make_own_folder()
    assert folder.is_dir()
    assert len(made) == 2
    assert folder == made[1]
