"""What is refused, and what the overflow policies make of a request that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rigs import EngineRig, greedy, key_of, sampled, stream_of

from kvfleet.worker.port.outputs import SequenceFailed
from kvproto.errors import ContextLengthExceeded, InvalidRequest
from kvproto.messages import ChoiceFinished, FinishReason, Overflow, Sampling

Asked = Callable[[EngineRig], dict[str, Any]]


def fits(rig: EngineRig) -> dict[str, Any]:
    return {"prompt": rig.prompt(20), "sampling": greedy(8)}


# By what is wrong: the request, its field, and what the message says of the limit.
WRONG: dict[str, tuple[Asked, str, str]] = {
    "no prompt": (lambda rig: {"prompt": ()}, "prompt_ids", "at least 1"),
    "id too large": (lambda rig: {"prompt": (rig.vocab_size,)}, "prompt_ids", "0 to 1023"),
    "id below 0": (lambda rig: {"prompt": (3, -1)}, "prompt_ids", "0 to 1023"),
    "output id": (lambda rig: {"output_ids": (rig.vocab_size,)}, "output_ids", "0 to 1023"),
    "fewer tokens than none": (lambda rig: {"sampling": Sampling(-1)}, "max_tokens", "at least 0"),
    "cold": (lambda rig: {"sampling": Sampling(1, temperature=-0.1)}, "temperature", "at least 0"),
    "not a number": (lambda rig: {"sampling": Sampling(1, temperature=float("nan"))}, "temperature", "at least 0"),
    "top_p": (lambda rig: {"sampling": Sampling(1, top_p=1.5)}, "top_p", "0 to 1"),
    "top_k": (lambda rig: {"sampling": Sampling(1, top_k=-1)}, "top_k", "at least 0"),
}
TOO_LONG: dict[str, tuple[Asked, str, str]] = {
    "full": (lambda rig: {"prompt": rig.prompt(1024)}, "prompt_ids", "at most 1023"),
    "longer": (lambda rig: {"prompt": rig.prompt(1030)}, "prompt_ids", "has 1030 tokens, the context of 1024"),
    "too much": (
        lambda rig: {"prompt": rig.prompt(1000), "sampling": greedy(25)},
        "max_tokens",
        "the 24 tokens that the context of 1024 leaves",
    ),
    "no room": (
        lambda rig: {"sampling": greedy(1024, overflow=Overflow.TRUNCATE_LEFT)},
        "max_tokens",
        "leaves no room for a prompt",
    ),
    "nothing to cut": (
        lambda rig: {"prompt": rig.prompt(1024), "sampling": greedy(8, overflow=Overflow.TRUNCATE_GENERATION)},
        "prompt_ids",
        "at most 1023",
    ),
}


async def test_a_refusal_names_field_and_limit_and_disturbs_no_other(rig: EngineRig) -> None:
    asked = fits(rig)
    good = rig.spec("good", asked["prompt"], greedy(60))
    expected = await rig.run(replace(good, request="before"))
    rig.submit(good)
    await rig.until_tokens(good)
    for wrong, (error, cases) in {
        "invalid": (InvalidRequest, WRONG),
        "too long": (ContextLengthExceeded, TOO_LONG),
    }.items():
        for name, (fields, field, says) in cases.items():
            refused = await rig.run(rig.spec(f"{wrong} {name}", **(fits(rig) | fields(rig))))
            assert type(refused.error) is error, name
            assert refused.error.field == field, name
            assert says in refused.error.message, name
            assert refused.started is None
    await rig.until(key_of(good))
    assert rig.stream(key_of(good)).result == expected.result
    await rig.until_idle()


async def test_all_that_the_context_leaves_is_generated(rig: EngineRig) -> None:
    stream = await rig.run(rig.spec("r", rig.prompt(1000), greedy(24)))
    assert (len(stream.ids), stream.reason) == (24, FinishReason.LENGTH)


async def test_the_same_attempt_and_choice_twice_is_refused_and_the_first_goes_on(rig: EngineRig) -> None:
    prompt = rig.prompt(20)
    plain = await rig.run(rig.spec("plain", prompt, sampled(60)))
    first = rig.spec("r", prompt, sampled(60))
    rig.submit(first, first)
    later = await rig.run(replace(first, attempt=1))
    await rig.until(key_of(first))
    outputs = rig.recorder.outputs[key_of(first)]
    failed = [output for output in outputs if isinstance(output, SequenceFailed)]
    assert [type(one.error) for one in failed] == [InvalidRequest]
    assert [one.error.field for one in failed] == ["request"]
    assert sum(isinstance(output, ChoiceFinished) for output in outputs) == 1
    went_on = stream_of(first, [output for output in outputs if output is not failed[0]])
    assert went_on.result == later.result == plain.result


async def test_choices_of_one_attempt_have_one_prompt(rig: EngineRig) -> None:
    first = rig.spec("r", rig.prompt(20), sampled(60, n=2), choice=1)
    rig.submit(first)
    refused = await rig.run(replace(first, prompt_ids=rig.prompt(20, 2), choice=0))
    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.field == "prompt_ids"
    other_attempt = await rig.run(replace(first, prompt_ids=rig.prompt(20, 2), attempt=1))
    await rig.until(key_of(first))
    assert rig.stream(key_of(first)).reason is other_attempt.reason is FinishReason.LENGTH


# ---------------------------------------------------------------------- overflow


async def test_truncate_left_is_as_if_the_prompt_had_begun_later(rig: EngineRig) -> None:
    prompt = rig.prompt(1100)
    asked = greedy(12, overflow=Overflow.TRUNCATE_LEFT)
    cut, plain = await rig.run_all(rig.spec("cut", prompt, asked), rig.spec("plain", prompt[-1012:], greedy(12)))
    assert cut.result == plain.result
    assert cut.started is not None
    assert cut.started.prompt_tokens == 1012


async def test_truncate_generation_ends_with_the_context(rig: EngineRig) -> None:
    prompt = rig.prompt(1010)
    asked = greedy(500, overflow=Overflow.TRUNCATE_GENERATION)
    cut, plain = await rig.run_all(rig.spec("cut", prompt, asked), rig.spec("plain", prompt, greedy(14)))
    assert cut.result == plain.result
    assert cut.reason is FinishReason.LENGTH


async def test_sliding_goes_on_without_the_older_half(rig: EngineRig) -> None:
    prompt = rig.prompt(1016)
    slid, plain = await rig.run_all(
        rig.spec("slid", prompt, greedy(24, overflow=Overflow.SLIDING)), rig.spec("plain", prompt, greedy(8))
    )
    assert slid.reason is FinishReason.LENGTH
    assert slid.ids[:8] == plain.ids
    seen = [*prompt, *plain.ids][512:]
    after = await rig.run(rig.spec("after", seen, greedy(16)))
    assert slid.ids[8:] == after.ids


async def test_a_prompt_longer_than_the_context_slides_at_once(rig: EngineRig) -> None:
    prompt = rig.prompt(1100)
    asked = greedy(8, overflow=Overflow.SLIDING)
    slid, plain = await rig.run_all(rig.spec("slid", prompt, asked), rig.spec("plain", prompt[512:], greedy(8)))
    assert slid.result == plain.result
    assert slid.started is not None
    assert slid.started.prompt_tokens == 1100 - 512


async def test_another_attempt_goes_on_past_a_slide(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(1016), sampled(24, overflow=Overflow.SLIDING))
    uncut = await rig.run(spec)
    for count in (4, 8, 15):
        sent = len("".join(uncut.pieces[:count]))
        rest = await rig.run(replace(spec, attempt=count, output_ids=uncut.ids[:count], text_sent=sent))
        assert rest.result == (uncut.ids[count:], uncut.text[sent:], uncut.reason)
