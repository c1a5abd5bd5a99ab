"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvservice.byte_size import parse_bytes, readable


def test_sizes_as_people_write_them() -> None:
    assert parse_bytes("8GiB") == 8 * 2**30
    assert parse_bytes("1.5 g") == 1_500_000_000
    assert parse_bytes("500 MB") == 500_000_000
    assert parse_bytes("4096B") == parse_bytes("4KiB") == 4096
    assert parse_bytes("8589934592") == parse_bytes("8GiB")
    for wrong in ("", "much", "8 XB", "-1GiB", "1..5G", "8GiBs", "0", "0GiB", "0.1B"):
        with pytest.raises(ValueError):
            parse_bytes(wrong)


@pytest.mark.parametrize("text", ["8", "64", "4096", " 80 ", "1e3"])
def test_a_small_number_lacks_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match=f"say {text.strip()}GiB, or {text.strip()}B if that is meant"):
        parse_bytes(text)


def test_sizes_as_people_read_them() -> None:
    assert [readable(size) for size in (12, 12_288, 3 * 2**40, 2**50)] == ["12 B", "12.0 KiB", "3.0 TiB", "1.0 PiB"]
