"""What running answers may hold of an ingress's memory: what a token really takes, and who ends at the bound."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from ingress_build import demo_tokenizer
from test_ingress_runs import Rig, settle

from kvfleet.ingress.answers.openai_events import OpenAiForm
from kvfleet.ingress.answers.prompt_answers import ShownPrompt
from kvfleet.ingress.limits.admission import STREAMED, WHOLE, RunMemory, TokenCosts
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.runs.transcript import BASE_BYTES, Transcript
from kvfleet.ingress.settings import RunLimits
from kvproto import codec
from kvproto.errors import PayloadTooLarge, Unavailable
from kvproto.messages import (
    ChoiceFinished,
    Finished,
    FinishReason,
    PromptScores,
    Sampling,
    Started,
    TokenLogprobs,
    Tokens,
)

COUNT = 500


def frames(top: int | None) -> list[bytes]:
    """A token each, as NATS brings them."""
    chance = random.Random(3)
    tokens = range(300, 1000)  # none that CPython shares

    def scores() -> TokenLogprobs:
        tops = tuple(chance.sample(tokens, top or 0))
        return TokenLogprobs(-chance.random(), tops, tuple(-chance.random() for _ in tops))

    return [
        codec.encode_frames(
            [Tokens("r", 0, 0, at, (chance.choice(tokens),), (f" word{at}",), (scores(),) if top is not None else ())]
        )
        for at in range(COUNT)
    ]


@pytest.mark.parametrize("top", [None, 0, 5, 20])
@pytest.mark.parametrize("chat", [None, True, False])
def test_a_token_takes_no_more_than_is_counted(top: int | None, chat: bool | None) -> None:
    """`chat` None: streamed; else sent whole as a chat's or a completion's answer."""
    encoded, spelling = frames(top), demo_tokenizer().spelling
    transcript = Transcript.of(1, STREAMED if chat is None else WHOLE)
    form = OpenAiForm("r", "m", 0, "f", bool(chat), 1, spelling if top is not None else None)
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        for data in encoded:
            transcript.take(codec.decode_frames(data))
        transcript.take([Finished("r", 0, FinishReason.STOP, 1, COUNT)])
        if chat is not None:
            form.body(transcript)
        taken = tracemalloc.get_traced_memory()[1] - began
    finally:
        tracemalloc.stop()
    assert taken <= transcript.size
    assert transcript.size == BASE_BYTES + transcript.costs.of(COUNT, top)
    assert transcript.size <= 4 * taken, "nor much less"


@pytest.mark.parametrize("top", [0, 5, 20])
@pytest.mark.parametrize("shows", ["echo streamed", "echo", "list", "list of a chat", "ids"])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_prompts_scores_take_no_more_than_is_counted(top: int, shows: str, choices: int) -> None:
    chance, spelling = random.Random(3), demo_tokenizer().spelling
    ids = tuple(chance.randrange(300, 1000) for _ in range(COUNT + 1))
    text = "".join(map(spelling.text_of, ids))

    def scores() -> TokenLogprobs:
        tops = tuple(chance.sample(range(300, 1000), top))
        return TokenLogprobs(-chance.random(), tops, tuple(-chance.random() for _ in tops), chance.randrange(300, 1000))

    encoded = [
        codec.encode_frames([PromptScores("r", 0, at, tuple(scores() for _ in range(100)))])
        for at in range(1, COUNT + 1, 100)
    ]
    shown = {
        "echo streamed": ShownPrompt(ids, spelling, text, top),
        "echo": ShownPrompt(ids, spelling, text, top),
        "list": ShownPrompt(ids, spelling, ranked=top),
        "list of a chat": ShownPrompt(ids, spelling, ranked=top),
        "ids": ShownPrompt(ids, spelling, text, tells_ids=True),
    }[shows]
    streamed = shows == "echo streamed"
    form = OpenAiForm("r", "m", 0, "f", "chat" in shows, choices, spelling, shown=shown)
    transcript = Transcript.of(choices, STREAMED if streamed else WHOLE, COUNT)
    transcript.started = Started("r", 0, "w", COUNT + 1, {})
    ends = [ChoiceFinished("r", 0, at, FinishReason.LENGTH, 0) for at in range(choices)]
    writer = form.writer()
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        if shows != "ids":
            for data in encoded:
                transcript.take(codec.decode_frames(data))
        transcript.take([*ends, Finished("r", 0, FinishReason.LENGTH, COUNT + 1, 0)])
        if streamed:
            out: list[bytes] = []
            writer.started(transcript, out)
        else:
            form.body(transcript)
        taken = tracemalloc.get_traced_memory()[1] - began
    finally:
        tracemalloc.stop()
    counted = transcript.size + form.size
    assert taken <= counted
    assert counted <= 8 * taken + 4 * BASE_BYTES, "nor much less"


def small(limit: int = 100_000) -> Rig:
    rig = Rig(RunLimits(running_bytes=limit))
    rig.sampling = Sampling(max_tokens=10_000)
    return rig


async def running(rig: Rig, name: str) -> tuple[Run, object, Any]:
    """A run that has begun, with its stream, which says no more than it is told to."""
    run, reader = rig.come(name)
    await run.step()
    for stream in rig.streams:
        stream.error = stream.error or Unavailable("another's")  # the rig has one stream at a time
    await run.step()
    for stream in rig.streams:
        stream.error = None
    return run, reader, rig.streams[-1]


async def brings(run: Run, stream: Any, count: int) -> None:
    at = len(run.transcript.ids)
    stream.ready.append(Tokens("r", 0, 0, at, tuple(range(at, at + count)), ("x",) * count))
    await run.step()


async def test_at_the_bound_the_largest_ends_and_the_others_go_on() -> None:
    rig = small()
    memory, turn = rig.runs.memory, rig.turn
    runs = []
    for name in ("a", "b", "c"):
        turn.held = False
        runs.append(await running(rig, name))
    large, reader, stream = runs[0]
    while not large.over:
        await brings(large, stream, 20)
        assert memory.used <= memory.limit
    assert isinstance(large.error, PayloadTooLarge)
    assert "more than its share" in str(large.error)
    assert large.transcript.ids == (), "its memory is free, whoever reads it yet"
    assert stream.error is not None, "nothing runs for it"
    assert memory.used < memory.half
    await rig.runs.detach(large, reader)
    again, other = rig.come("a")
    assert again is not large, "it is not kept"
    await rig.runs.detach(again, other)
    for run, _, one in runs[1:]:
        await brings(run, one, 100)
        assert run.error is None
    rig.runs.check_integrity()


async def test_small_ones_go_on_beside_one_that_waits_at_the_bound() -> None:
    """Its reader is slow: it neither grows nor ends, nobody is let in, and those below their share grow to it."""
    rig = small()
    memory = rig.runs.memory
    large, reader, stream = await running(rig, "a")
    rig.turn.held = False
    small_one, other, its = await running(rig, "b")
    await brings(large, stream, (memory.half - memory.used) // STREAMED.token)
    await brings(small_one, its, 2)
    assert memory.used > memory.half
    with pytest.raises(Unavailable, match="used up their memory") as error:
        memory.check_room()
    assert error.value.retry_after_s
    while not small_one.over:
        await brings(small_one, its, 10)
    assert isinstance(small_one.error, PayloadTooLarge), "beyond its share it ends as well"
    assert memory.used <= memory.limit
    await rig.runs.detach(small_one, other)
    await brings(large, stream, 1)
    assert large.error is None
    await rig.runs.detach(large, reader)
    assert (memory.used, memory.holders) == (0, 0)
    await settle()
    rig.runs.check_integrity()


def test_an_answer_that_no_waiting_makes_room_for() -> None:
    memory = RunMemory(200_000)
    memory.check_longest(Sampling(max_tokens=700), STREAMED, "max_tokens")
    for said, costs in (
        (Sampling(max_tokens=100, n=8), STREAMED),
        (Sampling(max_tokens=100, logprobs=20), STREAMED),
        (Sampling(max_tokens=600), WHOLE),
    ):
        with pytest.raises(PayloadTooLarge, match=r"max_completion_tokens: n \* max_completion_tokens is"):
            memory.check_longest(said, costs, "max_completion_tokens")


def test_costs_add_up() -> None:
    assert TokenCosts(1, 10, 100).of(3, None) == 3
    assert TokenCosts(1, 10, 100).of(3, 2) == 3 * 211


async def test_one_that_is_longer_than_all_that_is_kept_drives_nobody_out() -> None:
    rig = Rig(RunLimits(bytes=20_000))
    await rig.whole("small")
    rig.turn.held = False
    rig.form = type(rig.form)("r", "s", "p" * 30_000)
    await rig.whole("long")
    assert rig.runs.kept == 1
    assert rig.runs.known("t", _named("small")) is not None
    rig.runs.check_integrity()


def _named(name: str) -> Any:
    from kvfleet.ingress.runs.repeats import RequestName

    return RequestName(name)
