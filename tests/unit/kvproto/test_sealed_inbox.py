"""Names of inboxes that prove who reads there."""

from __future__ import annotations

import pytest

from kvproto.subjects import (
    INGRESS_INBOX,
    PLACEMENT_INBOX,
    PRODUCER_INBOX,
    WORKER_INBOX,
    batch_inbox,
    is_answer_inbox,
    is_inbox,
    is_of_the_fleet,
    request_inbox,
    sealed_prefix,
)

KEY = b"the fleet's"


@pytest.mark.parametrize("role", [INGRESS_INBOX, PLACEMENT_INBOX])
@pytest.mark.parametrize("process", ["i1", "ingress-0", "a-b-c_d", "x" * 64])
def test_who_has_the_key_is_believed(role: str, process: str) -> None:
    prefix = sealed_prefix(role, process, KEY)
    assert prefix.count(".") == 1, "as deep as any: permissions and other regions go by that"
    for inbox in (prefix, batch_inbox(prefix), request_inbox(prefix, "r", 0), f"{prefix}.nuid.7"):
        assert is_inbox(inbox)
        assert is_of_the_fleet(inbox, KEY)
        assert not is_of_the_fleet(inbox, b"another")


def test_who_has_it_not_is_not() -> None:
    sealed = sealed_prefix(INGRESS_INBOX, "i1", KEY)
    seal = sealed.rpartition("-")[2]
    for name in (
        "", "_ing", "_ing.i1", "_ing.i1.b", "_ing.i1-", f"_ing.i2-{seal}", f"_plc.i1-{seal}", f"_ing.{seal}",
        sealed[:-1], sealed + "a", "_ing.i1-\u00e9", f"_prd.a.i1-{seal}", sealed_prefix(INGRESS_INBOX, "i1", b"other"),
    ):  # fmt: skip
        assert not is_of_the_fleet(name, KEY), name
    for role in (PRODUCER_INBOX, WORKER_INBOX):
        assert not is_of_the_fleet(sealed_prefix(role, "i1", KEY), KEY)


def test_without_a_key_names_are_plain_and_roles_are_believed() -> None:
    assert sealed_prefix(INGRESS_INBOX, "i1", b"") == "_ing.i1"
    assert is_of_the_fleet("_ing.i1.b", b"")
    assert not is_of_the_fleet("_prd.a.x", b"")


def test_an_answer_goes_where_no_stream_is_read() -> None:
    for prefix in ("_ing.i1", "_prd.a.x"):
        assert is_answer_inbox(f"{prefix}.nuid.7")
        assert is_answer_inbox(f"{prefix}.x.r")
        for stream in (request_inbox(prefix, "r", 0), batch_inbox(prefix), f"{prefix}.l.3"):
            assert is_inbox(stream)
            assert not is_answer_inbox(stream)
    assert is_answer_inbox("_INBOX.x")
    assert not is_answer_inbox("kvf.worker.w1.cancel")
