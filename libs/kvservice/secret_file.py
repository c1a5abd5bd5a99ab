"""A secret in a file of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvproto.errors import InvalidRequest


def read_secret(path: Path, field: str) -> str:
    """Without surrounding blanks. Raises InvalidRequest."""
    try:
        text = path.read_text("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field=field) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} holds something else than text", field=field) from None
    if not text:
        raise InvalidRequest(f"{path} is empty", field=field)
    return text


def write_secret(path: Path, data: bytes) -> None:
    """Mode 0600; the file appears whole or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
