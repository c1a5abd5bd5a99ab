"""A stream that another attempt goes on with is the same stream, and so is each of several choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rigs import EngineRig, Stream, greedy, key_of, sampled, seam, whole

from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.errors import Cancelled
from kvproto.messages import ChoiceFinished, FinishReason

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.4},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False},
    "all": {
        "top_p": 0.9,
        "top_k": 40,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 9,
        "ignore_eos": False,
    },
}


def after(spec: SequenceSpec, earlier: Stream, count: int, attempt: int, text_sent: int | None = None) -> SequenceSpec:
    """A new attempt after the first `count` tokens of an earlier one, whose text the client has unless told."""
    sent = len("".join(earlier.pieces[:count])) if text_sent is None else text_sent
    return replace(spec, attempt=attempt, output_ids=earlier.ids[:count], text_sent=sent)


async def test_a_seed_draws_the_same_and_another_one_does_not(rig: EngineRig) -> None:
    prompt = rig.prompt(30)
    one, same, other, none, none_again = await rig.run_all(
        rig.spec("one", prompt, sampled(16, 7)),
        rig.spec("same", prompt, sampled(16, 7)),
        rig.spec("other", prompt, sampled(16, 8)),
        rig.spec("none", prompt, sampled(16, None)),
        rig.spec("zero", prompt, sampled(16, 0)),
    )
    assert one.result == same.result != other.result
    assert none.result == none_again.result, "none is 0"


@pytest.mark.parametrize("way", WAYS)
async def test_another_attempt_goes_on_with_the_same_ids_and_text(rig: EngineRig, way: str) -> None:
    spec = rig.spec("r", rig.prompt(30), sampled(16, **WAYS[way]))
    uncut = await rig.run(spec)
    assert len(uncut.ids) >= 9
    cuts = [1, 4, 8, len(uncut.ids) - 1]
    for count, stream in zip(
        cuts, await rig.run_all(*(after(spec, uncut, count, count) for count in cuts)), strict=True
    ):
        sent = "".join(uncut.pieces[:count])
        assert stream.result == (uncut.ids[count:], uncut.text[len(sent) :], uncut.reason)
        assert stream.started is not None
        assert stream.started.prompt_tokens == 30


async def test_every_cut_of_a_stream_continues(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(30), sampled(8))
    uncut = await rig.run(spec)
    for count, stream in enumerate(await rig.run_all(*(after(spec, uncut, n, n) for n in range(1, 8))), 1):
        assert (stream.ids, "".join(uncut.pieces[:count]) + stream.text) == (uncut.ids[count:], uncut.text)


async def test_a_stream_cut_while_it_runs_continues(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(30), sampled(900, presence_penalty=0.5))
    uncut = await rig.run(replace(spec, request="uncut"))
    rig.submit(spec)
    await rig.until_tokens(spec, 5)
    rig.engine.cancel("r", 0)
    await rig.until(key_of(spec))
    cut = rig.stream(key_of(spec))
    assert isinstance(cut.error, Cancelled)
    rest = await rig.run(after(spec, cut, len(cut.ids), 1))
    assert (cut.ids + rest.ids, cut.text + rest.text, rest.reason) == uncut.result


async def test_text_that_was_held_back_leaves_once(rig: EngineRig) -> None:
    """The client may have any part of the last tokens' text, also the part that a stop string may begin with."""
    plain = rig.spec("r", rig.prompt(30), sampled(16))
    uncut = await rig.run(plain)
    known = "".join(uncut.pieces[:8])
    held = replace(plain, sampling=replace(plain.sampling, stop=(known[-4:] + " never to be seen",)))
    assert (await rig.run(replace(held, request="held"))).result == uncut.result
    for spec in (plain, held):
        sent = range(len(known) - 5, len(known) + 1)
        asked = [after(replace(spec, request=f"{spec.sampling.stop}"), uncut, 8, 1 + one, one) for one in sent]
        for one, stream in zip(sent, await rig.run_all(*asked), strict=True):
            assert stream.result == (uncut.ids[8:], uncut.text[one:], uncut.reason)


async def test_a_stop_string_that_began_in_an_earlier_attempt_is_found(rig: EngineRig) -> None:
    spec = rig.spec("r", rig.prompt(30), sampled(16))
    uncut = await rig.run(spec)
    cut, stop = seam(uncut)
    sent = "".join(uncut.pieces[:cut])[:-1]
    stopping = replace(spec, sampling=replace(spec.sampling, stop=(stop,)))
    stream = await rig.run(after(stopping, uncut, cut, 1, len(sent)))
    assert stream.result == (uncut.ids[cut : cut + 1], "", FinishReason.STOP)
    assert isinstance(stream.end, ChoiceFinished)
    assert stream.end.stop == stop


async def test_an_attempt_after_all_of_it_ends_at_once(rig: EngineRig) -> None:
    spec = rig.spec("length", rig.prompt(30), sampled(8))
    uncut = await rig.run(spec)
    stopping = replace(spec, request="stop", sampling=replace(spec.sampling, stop=(uncut.text[:2],)))
    count = next(n for n in range(9) if len("".join(uncut.pieces[:n])) >= 2)
    fed = rig.recorder.fed_tokens
    length, stop = await rig.run_all(after(spec, uncut, 8, 1), after(stopping, uncut, count, 1, 0))
    assert length.result == ((), "", FinishReason.LENGTH)
    assert stop.result == ((), "", FinishReason.STOP)
    assert rig.recorder.fed_tokens == fed


# ---------------------------------------------------------------------- several choices


def choices(rig: EngineRig, request: str, n: int = 3, **fields: Any) -> list[SequenceSpec]:
    return [rig.spec(request, rig.prompt(40), sampled(12, n=n), choice=choice, **fields) for choice in range(n)]


async def test_choices_differ_and_all_end(rig: EngineRig) -> None:
    streams = await rig.run_all(*choices(rig, "r"))
    assert [(len(stream.ids), stream.reason) for stream in streams] == [(12, FinishReason.LENGTH)] * 3
    assert len({stream.ids for stream in streams}) == 3


async def test_choices_share_what_the_first_one_computes(rig: EngineRig) -> None:
    first, *others = await rig.run_all(*choices(rig, "r"))
    assert first.cached_tokens == 0
    assert all(whole(39) <= other.cached_tokens <= 39 for other in others)


async def test_greedy_choices_are_equal(rig: EngineRig) -> None:
    specs = [rig.spec("r", rig.prompt(40), greedy(8, n=2), choice=choice) for choice in range(2)]
    one, other = await rig.run_all(*specs)
    assert one.result == other.result


async def test_a_choice_alone_and_one_that_goes_on_are_as_among_the_others(rig: EngineRig) -> None:
    together = await rig.run_all(*choices(rig, "r"))
    (alone,) = await rig.run_all(choices(rig, "alone")[1])
    assert alone.result == together[1].result
    done = (2, 11, 0)
    specs = [after(spec, stream, n, 1) for spec, stream, n in zip(choices(rig, "r"), together, done, strict=True)]
    assert same_rest(await rig.run_all(*specs), together, done)


def same_rest(rest: Sequence[Stream], together: Sequence[Stream], done: Sequence[int]) -> bool:
    return [(stream.ids, stream.text) for stream in rest] == [
        (stream.ids[n:], "".join(stream.pieces[n:])) for stream, n in zip(together, done, strict=True)
    ]
