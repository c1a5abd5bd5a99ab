"""Ids and subjects: what is legal, what is refused, and that no name reaches beyond its own token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import InvalidRequest
from kvproto.ids import epoch, is_token, model_token, new_epoch, new_process_id, new_request_id, session_key
from kvproto.subjects import Subjects, batch_inbox, inbox_prefix, member_key, request_inbox, request_inboxes

S = Subjects()
anything = st.text(max_size=80) | st.sampled_from(
    ["", ".", "*", ">", "a.b", "a b", "a\n", "$SYS", "ü", "x" * 65, "a\0b"]
)
tokens = st.text("ABCxyz019_-", min_size=1, max_size=64)


@given(anything)
def test_a_token_is_one_legal_part_of_a_subject(text: str) -> None:
    if is_token(text):
        assert 1 <= len(text) <= 64
        assert text.isascii()
        assert not set(text) & set(".*> \t\r\n\0$")


@given(anything, st.sampled_from(["place", "generate", "worker_generate"]))
def test_no_tenant_widens_or_splits_a_subject(tenant: str, method: str) -> None:
    arguments = ("w1", tenant) if method == "worker_generate" else (tenant, "m")
    if is_token(tenant):
        subject = getattr(S, method)(*arguments)
        assert tenant in subject.split(".")
        assert not set(subject) & set("*> \r\n\0")
    else:
        with pytest.raises(InvalidRequest) as caught:
            getattr(S, method)(*arguments)
        assert caught.value.field == "tenant"


WORKER_METHODS = [
    "worker_cancel",
    "worker_resend",
    "worker_pause",
    "worker_admin",
    "worker_generate_all",
    "events",
    "blocks",
]


@given(anything, st.sampled_from([*WORKER_METHODS, "heartbeat"]))
def test_no_worker_id_widens_or_splits_a_subject(worker: str, method: str) -> None:
    region, _, own = worker.rpartition(".")
    if is_token(worker):
        assert worker in getattr(S, method)(worker).split(".")
    elif method.startswith("worker_") and is_token(region) and is_token(own):  # of another region
        assert getattr(S, method)(worker).split(".")[:5] == ["kvf", "region", region, "worker", own]
    else:
        with pytest.raises(InvalidRequest) as caught:
            getattr(S, method)(worker)
        assert caught.value.field == ("member" if method == "heartbeat" else "worker")


def test_a_worker_of_another_region_is_reached_under_that_region_and_one_of_the_own_is_not() -> None:
    here = Subjects("kvf", "eu")
    assert here.worker_generate("us.w1", "acme") == "kvf.region.us.worker.w1.generate.acme"
    assert here.worker_cancel("eu.w1") == here.worker_cancel("w1") == "kvf.worker.w1.cancel"
    assert here.region_worker("w1", "generate.*") == "kvf.region.eu.worker.w1.generate.*"
    assert Subjects("kvf", "us").worker_resend("eu.w1") == here.region_worker("w1", "resend")
    with pytest.raises(InvalidRequest):
        Subjects("kvf", "a.b")


@given(anything)
def test_any_model_name_is_one_token_of_its_subject(model: str) -> None:
    parts = S.place("public", model).split(".")
    assert parts[:3] == ["kvf", "place", "public"]
    assert len(parts) == 4
    assert is_token(parts[3])


@given(anything, anything)
def test_model_tokens_do_not_collide(one: str, other: str) -> None:
    assert (model_token(one) == model_token(other)) == (one == other)


def test_a_served_name_cannot_imitate_a_hashed_one() -> None:
    hashed = model_token("org/model")
    assert hashed.startswith("m_")
    assert model_token(hashed) != hashed


@given(st.tuples(tokens, anything), st.tuples(tokens, anything))
def test_session_keys_do_not_meet(one: tuple[str, str], other: tuple[str, str]) -> None:
    key = session_key(*one)
    assert all(is_token(part) for part in key.split("."))
    assert (key == session_key(*other)) == (one == other)


@pytest.mark.parametrize("namespace", ["", "a.b", "*", ">", "k v"])
def test_namespace_is_a_token(namespace: str) -> None:
    with pytest.raises(InvalidRequest, match="namespace"):
        Subjects(namespace)


def test_namespaces_share_nothing() -> None:
    other = Subjects("other")
    for method, arguments in (("place", ("t", "m")), ("events", ("w",)), ("placement_stats", ())):
        assert getattr(other, method)(*arguments).startswith("other.")
    assert other.members_bucket == "other_members"
    assert len({other.members_bucket, other.sessions_bucket, other.keys_bucket, other.responses_bucket}) == 4


def test_the_wire_names_of_the_design() -> None:
    assert S.place("t", "m") == "kvf.place.t.m"
    assert S.generate("t", "m") == "kvf.generate.t.m"
    assert S.worker_generate("w", "t") == "kvf.worker.w.generate.t"
    assert S.worker_cancel("w") == "kvf.worker.w.cancel"
    assert S.worker_resend("w") == "kvf.worker.w.resend"
    assert S.worker_pause("w") == "kvf.worker.w.pause"
    assert S.worker_admin("w") == "kvf.worker.w.admin"
    assert S.events("w") == "kvf.events.w"
    assert S.heartbeat("w") == "kvf.heartbeat.w"
    assert S.blocks("w") == "kvf.blocks.w"
    assert (S.members_bucket, S.sessions_bucket, S.keys_bucket) == ("kvf_members", "kvf_sessions", "kvf_keys")
    assert S.responses_bucket == "kvf_responses"
    assert member_key("worker", "w") == "worker.w"


@given(tokens)
def test_inboxes_lie_under_their_process_and_stay_apart(request: str) -> None:
    prefix = inbox_prefix("_ing", "i1")
    assert prefix == "_ing.i1"
    assert batch_inbox(prefix) == "_ing.i1.b"
    inbox = request_inbox(prefix, request, 3)
    assert inbox == f"_ing.i1.r.{request}.3"
    assert inbox.startswith(request_inboxes(prefix).rstrip(">"))
    assert inbox != batch_inbox(prefix)


def test_new_ids_are_tokens_and_differ() -> None:
    requests = {new_request_id() for _ in range(1000)}
    assert len(requests) == 1000
    assert all(is_token(request) and len(request) == 26 for request in requests)
    assert is_token(new_process_id())


@given(st.integers(0, 2**43), st.integers(0, 2**64 - 1))
def test_epochs_are_tokens_and_differ(started_ms: int, nonce: int) -> None:
    assert is_token(epoch(started_ms, nonce))
    assert new_epoch() != new_epoch()
