"""Sizes as people write them. Pure."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LEAST_BARE_NUMBER = 2**20


def parse_bytes(text: str) -> int:
    """`8GiB`, `500 MB`, `1e9`: bytes. Raises ValueError, also for a small number without a unit: that lacks one."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)(b?)\s*", text.lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match is not None and match[2] in _UNITS else 0
    if match is None or size < 1:
        raise ValueError(f"{text!r} is not a size such as 8GiB or 500MB")
    if size < LEAST_BARE_NUMBER and not (match[2] or match[3]):
        number = text.strip()
        raise ValueError(f"{number!r} would be {size:,} bytes: say {number}GiB, or {number}B if that is meant")
    return size


def readable(size: float) -> str:
    """Such as 12.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} PiB"
