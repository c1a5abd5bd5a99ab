"""Bounds that message fields carry in their annotations; the codec checks them when it reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MaxLength:
    """Most characters, bytes or items."""

    limit: int


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids: packed u32 little-endian on the wire, a plain list for producers and in JSON."""

    max_items: int
