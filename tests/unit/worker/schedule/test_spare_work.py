"""Work of the lowest priority takes what is left over, within a step too."""

from __future__ import annotations

from engine_rig import Transcript, expected_tokens, make_engine, spec

from kvproto.messages import SPARE_PRIORITY, Sampling


def test_it_sits_out_steps_that_have_a_prompt_of_other_work() -> None:
    engine = make_engine(token_budget=4)
    engine.add(spec("spare", [1, 2], max_tokens=20, priority=SPARE_PRIORITY))
    assert [engine.step().fed_tokens for _ in range(3)] == [2, 1, 1]
    engine.add(spec("other", range(3, 13), max_tokens=3))
    assert [engine.step().fed_tokens for _ in range(3)] == [4, 4, 2]  # the prompt's alone
    assert engine.step().fed_tokens == 2  # both decode
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions == 0


def test_it_gives_up_slots_and_blocks_and_ends_with_the_same_tokens() -> None:
    engine = make_engine(slots=1, blocks=8, block_size=2)
    engine.add(spec("spare", [1, 2, 3], max_tokens=6, priority=SPARE_PRIORITY))
    (transcript := Transcript()).take(engine.step())
    engine.add(spec("other", [4, 5, 6], max_tokens=4))
    transcript.run(engine)
    assert [key[0] for key in transcript.ends] == ["other", "spare"]
    assert engine.scheduler.preemptions == 1


def test_no_other_work_waits_for_a_prompt_that_sits_out() -> None:
    """Both have one prompt: the other work computes it itself, where its leader would be one that rests."""
    engine = make_engine(token_budget=4)
    prompt = list(range(1, 40))
    engine.add(spec("spare", prompt, max_tokens=2, priority=SPARE_PRIORITY))
    (transcript := Transcript()).take(engine.step())
    engine.add(spec("other", prompt, max_tokens=2))
    transcript.run(engine)
    assert [key[0] for key in transcript.ends] == ["other", "spare"]
    assert transcript.tokens["other", 0] == expected_tokens(prompt, Sampling(2, temperature=0.0))


def test_it_goes_on_where_the_other_work_cannot_run_yet() -> None:
    """Two requests that have begun hold all slots: spare work waits for no prompt that cannot be begun."""
    engine = make_engine(slots=2, blocks=64, block_size=4)
    engine.add(spec("spare", [1, 2, 3], max_tokens=30, priority=SPARE_PRIORITY))
    engine.add(spec("long", [4, 5, 6], max_tokens=30))
    (transcript := Transcript()).take(engine.step())
    engine.add(spec("next", [7, 8, 9], max_tokens=2))
    transcript.run(engine)
    assert [key[0] for key in transcript.ends] == ["next", "long", "spare"]
