"""Files that change while they are watched: in place, renamed over, behind swapped links, broken, half written."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvfleet.ingress.auth import access as access_module
from kvfleet.ingress.auth.access import Reload
from kvfleet.ingress.auth.api_keys import hash_key, parse_keys
from kvfleet.ingress.auth.key_files import read_sources
from kvproto.errors import InvalidRequest, Unavailable
from tests.support.waiting import LIMIT_S

POLL_S = 0.03


def text_of(*names: str) -> str:
    return json.dumps([{"name": name, "sha256": hash_key(name)} for name in names])


def mount(folder: Path, version: str, **files: str) -> None:
    """As Kubernetes writes a secret: files are links through `..data`, which is swapped as a whole."""
    real = folder / f"..{version}"
    real.mkdir(parents=True)
    for name, text in files.items():
        (real / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    (folder / "..data_tmp").symlink_to(real.name)
    os.replace(folder / "..data_tmp", folder / "..data")


class Watched:
    """What has been taken up from `path`, by names of keys."""

    def __init__(self, path: Path) -> None:
        self.names: list[str] = []
        self.told: list[str | None] = []
        self.reload = Reload(
            "API keys",
            lambda: read_sources(path, "api_keys_file"),
            self.take,
            seen=read_sources(path, "api_keys_file"),
            on_reload=lambda _, why_not: self.told.append(why_not),
        )

    def take(self, texts: tuple[str, ...]) -> None:
        self.names = [key.caller.name for key in parse_keys(*texts).keys]

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.names != list(names):
                await asyncio.sleep(0.005)


@pytest.fixture
async def watch(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Path], Watched]]:
    monkeypatch.setattr(access_module, "POLL_S", POLL_S)
    tasks: list[asyncio.Task[None]] = []

    def start(path: Path) -> Watched:
        watched = Watched(path)
        tasks.append(asyncio.create_task(watched.reload.run()))
        return watched

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Watch = Callable[[Path], Watched]


async def test_a_file_is_taken_up_when_it_changes(tmp_path: Path, watch: Watch) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text_of("a"))
    watched = watch(path)
    path.write_text(text_of("b"))  # in place
    await watched.until("b")
    (tmp_path / "new").write_text(text_of("c"))
    os.replace(tmp_path / "new", path)  # renamed over it
    await watched.until("c")
    before = path.stat()
    path.write_text(text_of("d"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # by a tool that keeps times
    await watched.until("d")
    assert watched.told == [None] * 3


async def test_a_mounted_secret_is_taken_up_when_its_links_are_swapped(tmp_path: Path, watch: Watch) -> None:
    mount(tmp_path, "v1", **{"api-keys.toml": text_of("a"), "more.json": text_of("b")})
    file, folder = watch(tmp_path / "api-keys.toml"), watch(tmp_path)
    mount(tmp_path, "v2", **{"api-keys.toml": text_of("c"), "more.json": text_of("d")})
    await file.until("c")
    await folder.until("c", "d")
    mount(tmp_path, "v3", **{"api-keys.toml": text_of("e")})
    await folder.until("e")  # a link that leads nowhere is no file


async def test_what_is_broken_is_said_once_and_the_old_keys_stay(
    tmp_path: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys.json"
    path.write_text(text_of("a"))
    watched = watch(path)
    path.write_text(text_of("b"))
    await watched.until("b")
    for at, broken in enumerate(('{"keys": [{"sha256": "Sk-LIVE-0123"}]}', "Sk-LIVE-0123", "", None)):
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        async with asyncio.timeout(LIMIT_S):
            while watched.reload.failures_total <= at:
                await asyncio.sleep(0.005)
        await asyncio.sleep(4 * POLL_S)
        assert watched.reload.failures_total == at + 1
        assert watched.names == ["b"]
    path.write_text(text_of("c"))
    await watched.until("c")
    assert watched.reload.reloads_total == 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 + 2
    assert all("\n" not in line and "LIVE" not in line and "API keys" in line for line in lines)
    assert not any("LIVE" in str(why) for why in watched.told)


async def test_what_changes_all_the_time_is_not_taken_half_written(tmp_path: Path, watch: Watch) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text_of("a"))
    taken: list[tuple[str, ...]] = []
    said = iter(range(10**9))
    growing = [True]
    # What is read differs every time, as while somebody writes; then it stays.
    reload: Reload[tuple[str, ...]] = Reload(
        "keys", lambda: (text_of(f"k{next(said)}" if growing[0] else "end"),), taken.append, seen=()
    )
    running = asyncio.create_task(reload.run())
    await asyncio.sleep(8 * access_module.POLL_S)
    assert not taken
    growing[0] = False
    async with asyncio.timeout(LIMIT_S):
        while not taken:
            await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert taken == [(text_of("end"),)]


def test_at_once_when_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text_of("a"))
    watched = Watched(path)
    path.write_text(text_of("b"))
    watched.reload.now()
    assert watched.names == ["b"]
    path.write_text("")
    for _ in range(2):
        watched.reload.now()  # whoever asks twice is answered twice
    assert watched.names == ["b"]
    assert watched.reload.failures_total == 2


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "empty", "bytes"):
        with pytest.raises(InvalidRequest) as error:
            read_sources(tmp_path / name, "api_keys_file")
        assert error.value.field == "api_keys_file"


async def test_a_look_that_began_before_we_were_told_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has read the old file and is slow to say so; meanwhile SIGHUP has taken the new one."""
    monkeypatch.setattr(access_module, "POLL_S", POLL_S)
    there, taken = ["old"], []
    slow, reading, looks = threading.Event(), threading.Event(), 0

    def read() -> str:
        nonlocal looks
        looks += 1
        said = there[0]
        if looks == 2:
            reading.set()
            slow.wait(2 * LIMIT_S)
        return said

    # One look has seen "old", which was not taken yet; the second sees it again.
    reload: Reload[tuple[str]] = Reload("keys", lambda: (read(),), lambda said: taken.append(said[0]), seen=("first",))
    running = asyncio.create_task(reload.run())
    await asyncio.to_thread(reading.wait, 5)
    there[0] = "new"
    reload.now()
    slow.set()
    async with asyncio.timeout(LIMIT_S):
        while looks < 6:
            await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert taken == ["new"]


def test_what_could_not_be_taken_just_now_is_tried_again() -> None:
    faults, taken = [Unavailable("not now")], []

    def take(said: tuple[str]) -> None:
        if faults:
            raise faults.pop()
        taken.append(said[0])

    reload: Reload[tuple[str]] = Reload("keys", lambda: ("new",), take, seen=("old",))
    for _ in range(3):
        reload._decide(reload._look())
    assert taken == ["new"]
    assert (reload.reloads_total, reload.failures_total) == (1, 1)
