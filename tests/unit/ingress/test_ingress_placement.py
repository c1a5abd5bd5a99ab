"""Policies that requests may name, and decisions as clients read them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from ingress_build import sent

from kvfleet.cli.clients import explain
from kvfleet.ingress.auth.api_keys import hash_key, parse_keys
from kvfleet.ingress.fleet.report import placements_report, read_request_id
from kvfleet.ingress.limits.callers import OPEN, Caller, require_policy
from kvfleet.ingress.requests.asks import ANYWHERE, PlacementAsk
from kvfleet.ingress.requests.bodies import read_chat, read_completion, read_generate
from kvproto.errors import InvalidRequest, PermissionDenied
from kvproto.messages import Actual, Candidate, Decision

REQUEST = "vppkeehnzs2676ab43zauajdmm"


def asks(**fields: Any) -> list[PlacementAsk]:
    """As each route reads it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    plain = {"model": "m", "prompt": "p", **fields}
    return [read_chat(chat).placement, read_completion(plain).placement, read_generate(plain).placement]


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, ANYWHERE),
        ({"policy": None, "worker": None}, ANYWHERE),
        ({"policy": "ring"}, PlacementAsk("ring")),
        ({"policy": "direct", "worker": "w1"}, PlacementAsk("direct", "w1")),
        ({"worker": "w1"}, PlacementAsk("direct", "w1")),
    ],
)
def test_every_route_takes_a_policy_and_a_worker(fields: dict[str, Any], read: PlacementAsk) -> None:
    assert asks(**fields) == [read] * 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"policy": 5}, "policy"),
        ({"policy": ""}, "policy"),
        ({"policy": "p" * 65}, "policy"),
        ({"policy": "direct"}, "worker"),
        ({"policy": "ring", "worker": "w1"}, "worker"),
        ({"worker": ["w1"]}, "worker"),
        ({"worker": ""}, "worker"),
    ],
)
def test_what_makes_no_sense_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        asks(**fields)
    assert error.value.field == field


def test_a_key_says_which_policies_its_requests_may_name() -> None:
    keys = parse_keys(
        json.dumps(
            [
                {"name": "plain", "sha256": hash_key("1")},
                {"name": "some", "sha256": hash_key("2"), "policies": ["ring", "direct"]},
                {"name": "admin", "sha256": hash_key("3"), "admin": True},
            ]
        )
    )
    plain, some, admin = (key.caller for key in keys.keys)
    assert some.policies == ("ring", "direct")
    for caller in (plain, some, admin, OPEN):
        require_policy(caller, None)
    for caller in (some, admin, OPEN):
        require_policy(caller, "ring")
    require_policy(OPEN, "anything")
    for caller, policy in ((plain, "ring"), (some, "cost")):
        with pytest.raises(PermissionDenied) as error:
            require_policy(caller, policy)
        assert error.value.field == "policy"
        assert policy in str(error.value)


@pytest.mark.parametrize("policies", ["ring", [5], ["a b"], {"ring": True}])
def test_a_key_files_policies_are_names(policies: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_keys(json.dumps([{"sha256": hash_key("1"), "policies": policies}]))
    assert error.value.field == "api_keys[0].policies"
    assert Caller("k").policies == ()


@pytest.mark.parametrize(
    ("said", "request_id"),
    [
        (REQUEST, REQUEST),
        (f"chatcmpl-{REQUEST}", REQUEST),
        (f"cmpl-{REQUEST}", REQUEST),
        ("chatcmpl-mine", "chatcmpl-mine"),  # a bare producer chose it
        ("Job_7", "Job_7"),
    ],
)
def test_ids_in_the_forms_that_clients_see(said: str, request_id: str) -> None:
    assert read_request_id(said) == request_id


@pytest.mark.parametrize("said", ["", "a b", "a/b", "x" * 65, "*", ">", "a.b", "ü"])
def test_what_can_be_no_id_is_refused(said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_request_id(said)
    assert error.value.field == "id"


def test_a_decision_in_units() -> None:
    decision = Decision(
        REQUEST, 1, "acme", "demo", 1_763_700_000_000, "cost", "w1", "cheapest", 40, {"device": 32}, 0.0125,
        (Candidate("w1", 12.5, {"prefill": 12.5}, {"device": 32}), Candidate("w2", 40.0)), 9, "p1",
        Actual(True, {"device": 16}, 0.001, 0.25, 9, True, "moved", 1.5), "w2", 64,
    )  # fmt: skip
    report = sent(placements_report(REQUEST, [decision]))
    (attempt,) = report["attempts"]
    assert report["request_id"] == REQUEST
    assert attempt == {
        "attempt": 1,
        "decided_unix_ms": 1_763_700_000_000,
        "placement_id": "p1",
        "tenant": "acme",
        "model": "demo",
        "policy": "cost",
        "worker_id": "w1",
        "why": "cheapest",
        "prompt_tokens": 40,
        "expected_hit_tokens": {"device": 32},
        "expected_ttft_ms": 12.5,
        "source_worker_id": "w2",
        "source_tokens": 64,
        "candidates": [
            {
                "worker_id": "w1",
                "chosen": True,
                "cost_ms": 12.5,
                "terms_ms": {"prefill": 12.5},
                "matched_tokens": {"device": 32},
            },
            {"worker_id": "w2", "chosen": False, "cost_ms": None, "terms_ms": {}, "matched_tokens": {}},
        ],
        "candidates_total": 9,
        "actual": {
            "accepted": True,
            "cached_tokens": {"device": 16},
            "queue_ms": 1.0,
            "ttft_ms": 250.0,
            "output_tokens": 9,
            "ended": True,
            "error_code": "moved",
            "total_ms": 1500.0,
            "saved_ms": 0.0,
        },
    }


def test_the_command_line_names_whom_to_pull_from(capsys: pytest.CaptureFixture[str]) -> None:
    decision = Decision(
        REQUEST, 0, "acme", "demo", 1_763_700_000_000, "cost", "w1", "cheapest", 1600, {"device": 32, "peer": 1024},
        0.0125, (Candidate("w1", 12.5, {"fetch": 12.5}, {"device": 32, "vault": 16, "peer": 1024}),), 1, "p1",
        Actual(True, {"device": 32, "peer": 1008}, 0.001, 0.25, 9, True),
    )  # fmt: skip
    for source, told in (("w2", "may pull from w2, which has 1,600 tokens of the prompt"), ("", "")):
        named = replace(decision, source=source, source_tokens=1600 if source else 0)
        (attempt,) = sent(placements_report(REQUEST, [named]))["attempts"]
        explain._show(REQUEST, attempt)
        shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert told in shown
        assert ("may pull" in " ".join(shown)) == bool(told)
        assert "cached tokens, peer 1,024 1,008" in shown
