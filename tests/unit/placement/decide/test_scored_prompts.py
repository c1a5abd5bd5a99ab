"""Where a prompt is scored, what is cached of it helps nobody, and proves nothing about a worker."""

from __future__ import annotations

from placement_rig import Rig, tokens

from kvfleet.placement.producers.forwarded import question_of
from kvfleet.placement.workers.feedback import LEAST_REQUESTS, Belief
from kvproto.messages import GenerateRequest, Passed, ProducerRequest, Sampling

PROMPT = tokens(1, 640)


def test_nothing_cached_is_expected() -> None:
    rig = Rig("w0", "w1")
    rig.store("w0", PROMPT)
    assert rig.place("plain", PROMPT).expected_hit == {"device": 639}
    scored = rig.place("scored", PROMPT, reusable=0)
    assert scored.expected_hit == {}
    assert scored.source == scored.elsewhere == ""
    assert rig.place("rest", PROMPT, reusable=100).expected_hit.get("device", 0) in (0, 100)


def test_workers_are_believed_whatever_they_compute_anew() -> None:
    rig = Rig("w0")
    rig.store("w0", PROMPT)
    experience = rig.core.state.fleet.workers["w0"].experience
    for number in range(3 * LEAST_REQUESTS):
        request = f"r{number}"
        rig.place(request, PROMPT, reusable=0)
        rig.pass_("w0", request, Passed.ACCEPTED, Passed.STARTED, prompt=len(PROMPT), cached=0)
        rig.end("w0", request)
    assert experience.belief is Belief.EXACT
    assert experience.missing_tokens_total == 0
    for number in range(3 * LEAST_REQUESTS):  # those that could have found it would be missed
        request = f"p{number}"
        rig.place(request, PROMPT)
        rig.pass_("w0", request, Passed.ACCEPTED, Passed.STARTED, prompt=len(PROMPT), cached=0)
        rig.end("w0", request)
    assert experience.belief is not Belief.EXACT


def test_a_bare_producers_prompt_too() -> None:
    def reusable(scored: int, asked: int | None) -> int | None:
        body = GenerateRequest("r", 0, "m", Sampling(1, prompt_logprobs=asked), "_i", prompt_ids=PROMPT, scored=scored)
        return question_of(body, 0, (), None).reusable

    assert (reusable(0, None), reusable(0, 1), reusable(1, 1), reusable(33, 1)) == (None, 0, 0, 32)
    assert ProducerRequest(prompt="x").prompt_logprobs is None
