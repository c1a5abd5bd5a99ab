"""What `up` keeps of a fleet between two starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfleet.cli.embedded.up import fleet_key
from kvproto.errors import InvalidRequest


def test_the_key_stays_the_same_and_is_this_users_alone(tmp_path: Path) -> None:
    key = fleet_key(tmp_path)
    assert len(key) >= 40
    assert fleet_key(tmp_path) == key
    assert (tmp_path / "fleet.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.key"]


def test_a_crash_before_it_is_whole_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, step, crash)
            with pytest.raises(Crash):
                fleet_key(tmp_path)
        assert not (tmp_path / "fleet.key").exists()
    assert fleet_key(tmp_path)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_one_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fleet.key").write_text(text)
    with pytest.raises(InvalidRequest, match=r"fleet\.key is empty"):
        fleet_key(tmp_path)
