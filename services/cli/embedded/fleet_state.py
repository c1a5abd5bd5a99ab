"""Adapter: the folders of an embedded fleet, and its secret, which is kept there."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfleet.cli.console import fail
from kvservice.own_folder import make_own_folder, remove_own_folder
from kvservice.secret_file import read_secret

FLEET_KEY = "fleet.key"


@contextmanager
def folders(state_dir: Path | None) -> Iterator[tuple[Path, Path]]:
    """One for what its processes need while they run, which goes with them, and one for the fleet's state: the user's,
    which stays, or the same."""
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
    """The secret of the tenants' cache salts and request ids, kept with the state so that it outlives a restart. The
    file appears whole. Raises InvalidRequest for one that is empty or cannot be read."""
    path = state / FLEET_KEY
    if not path.exists():
        number, fresh = tempfile.mkstemp(prefix=f".{FLEET_KEY}-", dir=state)  # this user's alone
        with os.fdopen(number, "w") as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(number)
        os.replace(fresh, path)
    return read_secret(path, "state_dir")
