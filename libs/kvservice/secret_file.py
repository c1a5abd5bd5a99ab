"""A secret that stands in a file of its own."""

from __future__ import annotations

from pathlib import Path

from kvproto.errors import InvalidRequest


def read_secret(path: Path, field: str) -> str:
    """Its text without blanks around it. Raises InvalidRequest."""
    try:
        text = path.read_text("ascii").strip()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field=field) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} holds something else than text", field=field) from None
    if not text:
        raise InvalidRequest(f"{path} is empty", field=field)
    return text
