"""Adapter: the folders of an embedded fleet, and the secret in them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfleet.cli.console import fail
from kvservice.own_folder import make_own_folder, remove_own_folder
from kvservice.secret_file import read_secret, write_secret


@contextmanager
def folders(state_dir: Path | None) -> Iterator[tuple[Path, Path]]:
    """One for the processes' temporary files, removed at the end, and one for the fleet's state: the user's, which
    stays, or the same."""
    if state_dir is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"cannot use --state-dir {state_dir}: {error.strerror}")
    try:
        own = make_own_folder()
    except OSError as error:
        fail(f"cannot make a temporary folder: {error}")
    try:
        yield own, own if state_dir is None else state_dir.resolve()
    finally:
        remove_own_folder(own)


def fleet_key(state: Path) -> str:
    """The secret of cache salts and request ids, the same after a restart. Raises InvalidRequest for an empty file or
    an unreadable one."""
    path = state / "fleet.key"
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(32).encode())
    return read_secret(path, "state_dir")
