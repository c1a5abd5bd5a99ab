"""Adapter: the files that hold keys: one file, or a folder of them as Kubernetes mounts a secret.

A mounted secret is a folder whose files are links into a hidden folder that is swapped as a whole; names that begin
with a dot are left out.
"""

from __future__ import annotations

from pathlib import Path

from kvproto.errors import InvalidRequest

MAX_FILE_BYTES = 16 * 1024 * 1024


def read_sources(path: Path, setting: str) -> tuple[str, ...]:
    """The texts of a file or of a folder's files, by name. Raises InvalidRequest naming the setting."""
    try:
        if not path.is_dir():
            return (_read(path),)
        files = sorted(one for one in path.iterdir() if not one.name.startswith(".") and one.is_file())
        texts = tuple(_read(one) for one in files)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field=setting) from None
    except ValueError:
        raise InvalidRequest(f"{path}: not text in UTF-8 of at most {MAX_FILE_BYTES} bytes", field=setting) from None
    if not texts:
        raise InvalidRequest(f"{path} holds no file", field=setting)
    return texts


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError
    return data.decode()
