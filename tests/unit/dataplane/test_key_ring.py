"""A ring of keys: the newest first, replaced as a whole, silent about secrets."""

from __future__ import annotations

import pytest

from kvproto.dataplane.keys import Key, KeyRing
from kvproto.errors import Unavailable


def test_the_last_key_is_current() -> None:
    ring = KeyRing({"old": b"1" * 32, "new": b"2" * 32})
    assert ring.current() == Key("new", b"2" * 32)
    assert [key.id for key in ring.newest_first()] == ["new", "old"]
    assert (ring.get("old"), ring.get("none")) == (b"1" * 32, None)


def test_an_update_replaces_all() -> None:
    given = {"a": b"1" * 32}
    ring = KeyRing(given)
    given["b"] = b"2" * 32
    assert ring.current().id == "a"
    ring.update({"c": b"3" * 32})
    assert (ring.get("a"), ring.current().id) == (None, "c")


def test_an_empty_ring_names_the_command() -> None:
    with pytest.raises(Unavailable, match="kvfleet init"):
        KeyRing().current()


def test_a_key_does_not_print_its_secret() -> None:
    key = Key("a", b"secret".ljust(32))
    assert "secret" not in f"{key} {key!r} {[key]}"
