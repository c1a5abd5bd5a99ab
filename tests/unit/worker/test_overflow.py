"""Requests that do not fit into the context: what the engine generates, and that another worker goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvproto.block_hash import ForkedRoot
from kvproto.errors import ContextLengthExceeded
from kvproto.messages import FinishReason, Overflow, Sampling

CONTEXT = 24


def sampling(overflow: Overflow, max_tokens: int = 40, **fields: object) -> Sampling:
    return Sampling(max_tokens, **({"temperature": 1.0, "seed": 5, "overflow": overflow} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize(
    ("prompt", "asked", "used"),
    [
        (range(60), sampling(Overflow.TRUNCATE_LEFT, 9), 15),
        (range(20), sampling(Overflow.TRUNCATE_GENERATION), 20),
        (range(5), sampling(Overflow.SLIDING, 100), 5),
        (range(60), sampling(Overflow.SLIDING, 100), 12),
    ],
)
def test_policy_generates_what_the_tokens_left_alone_would(
    prompt: range, asked: Sampling, used: int, budget: int
) -> None:
    engine = make_engine(context_length=CONTEXT, token_budget=budget)
    engine.add(spec("r", prompt, sampling=asked))
    engine.add(spec("beside", [7, 8, 9]))
    transcript = Transcript().run(engine)
    expected = expected_tokens(prompt, asked, context=CONTEXT)
    assert transcript.tokens["r", 0] == expected
    assert transcript.ends["r", 0] is FinishReason.LENGTH
    assert transcript.started["r", 0].prompt_tokens == used
    assert transcript.finished["r", 0].output_tokens == len(expected)
    assert transcript.tokens["beside", 0] == expected_tokens([7, 8, 9], Sampling(8, temperature=0.0))
    assert engine.pool.used == 0


@pytest.mark.parametrize("overflow", [o for o in Overflow if o is not Overflow.ERROR])
@pytest.mark.parametrize("length", [5, 15, 60])
def test_another_worker_goes_on_with_the_same_tokens(overflow: Overflow, length: int) -> None:
    asked = sampling(overflow, 17)
    if length == 60 and overflow is Overflow.TRUNCATE_GENERATION:
        with pytest.raises(ContextLengthExceeded):
            make_engine(context_length=CONTEXT).add(spec("r", range(length), sampling=asked))
        return
    expected = expected_tokens(range(length), asked, context=CONTEXT)
    for done in range(1, len(expected)):
        engine = make_engine(context_length=CONTEXT)
        engine.add(spec("r", range(length), attempt=1, sampling=asked, output_ids=tuple(expected[:done])))
        transcript = Transcript().run(engine)
        assert transcript.first_index["r", 1] == done
        assert transcript.tokens["r", 1] == expected[done:]
        used = {Overflow.TRUNCATE_LEFT: min(length, 7), Overflow.SLIDING: 12 if length == 60 else length}
        assert transcript.started["r", 1].prompt_tokens == used.get(overflow, length)


def test_what_slid_is_cached_as_what_it_is_now() -> None:
    """Blocks are found by the tokens that the model saw from position 0 on, and by nothing else."""
    engine = make_engine(context_length=CONTEXT, block_size=4)
    asked = sampling(Overflow.SLIDING, 30)
    engine.add(spec("slid", range(10), sampling=asked))
    generated = Transcript().run(engine).tokens["slid", 0]
    seen = [*range(10), *generated][24:39]  # the last token drawn was not run
    assert engine.kv.locate(spec("", []).root, seen)[0] == 15
    engine.add(spec("again", [*seen, 1], max_tokens=3))
    transcript = Transcript().run(engine)
    assert transcript.started["again", 0].cached_tokens == 15
    assert transcript.tokens["again", 0] == expected_tokens([*seen, 1], Sampling(3, temperature=0.0))


def test_a_truncated_prompt_is_not_shared_as_a_public_prefix() -> None:
    """Its first blocks are no longer the public ones: other tenants must not find them."""
    public, engine = b"public root 16 b", make_engine(context_length=CONTEXT, block_size=4)
    fork = ForkedRoot(public, b"own root 16 byte", 3)
    engine.add(replace(spec("r", range(30), sampling=sampling(Overflow.TRUNCATE_LEFT, 4)), root=fork))
    engine.add(replace(spec("s", range(10), sampling=sampling(Overflow.SLIDING, 30)), root=fork))
    Transcript().run(engine)
    assert engine.kv.locate(public, range(10, 30))[0] == 0
    assert engine.kv.locate(b"own root 16 byte", range(10, 30))[0] == 20
    assert engine.kv.locate(public, range(12))[0] == 10  # what really began with the prefix


def test_stop_strings_and_penalties_go_on_over_a_slide() -> None:
    asked = sampling(Overflow.SLIDING, 30)
    expected = expected_tokens(range(10), asked, context=CONTEXT)
    stop = f" {expected[13]} {expected[14]} "  # token 14 is the first one after the slide
    engine = make_engine(context_length=CONTEXT)
    draws = []
    run = engine.runner.run
    engine.runner.run = lambda slices: (  # type: ignore[method-assign]
        draws.extend(list(part.draw.output_ids) for part in slices if part.draw),
        run(slices),
    )[1]
    engine.add(spec("r", range(10), sampling=replace(asked, stop=(stop,), presence_penalty=0.5)))
    transcript = Transcript().run(engine)
    assert transcript.ends["r", 0] is FinishReason.STOP
    assert transcript.text["r", 0] == " ".join(map(str, expected[:13]))
    assert draws == [expected[:drawn] for drawn in range(15)]
