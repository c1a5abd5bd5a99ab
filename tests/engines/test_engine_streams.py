"""One sequence: it starts once, its tokens follow one another with their text, and it ends once."""

from __future__ import annotations

import time

import pytest
from rigs import EngineRig, greedy, sampled, seam

from kvfleet.worker.port.sequence_spec import SequenceTrace
from kvproto.errors import DeadlineExceeded
from kvproto.messages import FinishReason

FORCED = 100.0  # a bias that beats every logit


async def test_it_starts_runs_to_its_length_and_ends(rig: EngineRig) -> None:
    stream = await rig.run(rig.spec("r", rig.prompt(40), greedy(8)))
    assert stream.started is not None
    assert stream.started.prompt_tokens == 40
    assert stream.started.cached_tokens == 0
    assert stream.started.queue_seconds >= 0
    assert len(stream.ids) == 8
    assert all(0 <= token < rig.vocab_size for token in stream.ids)
    assert stream.reason is FinishReason.LENGTH


async def test_a_prompt_of_one_token_and_an_output_of_one(rig: EngineRig) -> None:
    stream = await rig.run(rig.spec("r", rig.prompt(1), greedy(1)))
    assert len(stream.ids) == 1
    assert stream.reason is FinishReason.LENGTH


async def test_pieces_join_to_the_tokenizers_text(rig: EngineRig) -> None:
    prompt = rig.prompt(20)
    asked = [greedy(24), *(sampled(24, seed) for seed in range(5))]
    specs = [rig.spec(f"r{number}", prompt, sampling) for number, sampling in enumerate(asked)]
    for stream in await rig.run_all(*specs):
        assert stream.text == rig.decode([*prompt, *stream.ids])[len(rig.decode(prompt)) :]


async def test_greedy_is_the_same_alone_again_and_beside_others(rig: EngineRig) -> None:
    prompt = rig.prompt(40)
    alone = await rig.run(rig.spec("alone", prompt, greedy(16)))
    again = await rig.run(rig.spec("again", prompt, greedy(16), root=rig.other_root))
    others = [rig.spec(f"r{number}", rig.prompt(30 + number, number), greedy(12)) for number in range(1, 5)]
    beside, *_ = await rig.run_all(rig.spec("beside", prompt, greedy(16)), *others)
    assert alone.result == again.result == beside.result


async def test_more_than_can_run_at_once_all_end(rig: EngineRig) -> None:
    specs = [rig.spec(f"r{number}", rig.prompt(9, number), greedy(4)) for number in range(20)]
    streams = await rig.run_all(*specs)
    assert [(len(stream.ids), stream.reason) for stream in streams] == [(4, FinishReason.LENGTH)] * 20


async def test_a_deadline_that_has_passed_ends_it(rig: EngineRig) -> None:
    stream = await rig.run(rig.spec("late", rig.prompt(9), greedy(8), deadline=time.monotonic() - 1.0))
    assert isinstance(stream.error, DeadlineExceeded)
    assert stream.ids == ()


async def test_a_trace_tells_when_its_stages_were(rig: EngineRig) -> None:
    trace = SequenceTrace()
    began = time.monotonic()
    await rig.run(rig.spec("r", rig.prompt(40), greedy(8), trace=trace))
    stages = trace.enqueued, trace.admitted, trace.prefilled, trace.ended
    assert None not in stages
    moments = [began, *(stage for stage in stages if stage is not None), time.monotonic()]
    assert moments == sorted(moments)
    assert trace.drawn_tokens == 8


# ---------------------------------------------------------------------- stop tokens


async def test_an_end_token_ends_it_and_is_neither_emitted_nor_counted(rig: EngineRig) -> None:
    prompt, eos = rig.prompt(20), rig.eos_ids[0]
    before, after = await rig.run_all(
        rig.spec("at once", prompt, greedy(8, ignore_eos=False, logit_bias={eos: FORCED})),
        rig.spec("ignored", prompt, greedy(8, logit_bias={eos: FORCED})),
    )
    assert before.result == ((), "", FinishReason.STOP)
    assert after.result == ((eos,) * 8, "", FinishReason.LENGTH)


async def test_stop_ids_of_a_request_do_so_too(rig: EngineRig) -> None:
    prompt = rig.prompt(20)
    plain = await rig.run(rig.spec("plain", prompt, sampled(8)))
    stopped = await rig.run(rig.spec("stopped", prompt, sampled(8, stop_ids=(plain.ids[5],))))
    first = plain.ids.index(plain.ids[5])
    assert stopped.result == (plain.ids[:first], "".join(plain.pieces[:first]), FinishReason.STOP)


async def test_no_stop_before_min_tokens(rig: EngineRig) -> None:
    """The first one after them may be one again."""
    eos = rig.eos_ids[0]
    asked = sampled(8, ignore_eos=False, min_tokens=3, logit_bias={eos: FORCED})
    stream = await rig.run(rig.spec("r", rig.prompt(20), asked))
    assert len(stream.ids) == 3
    assert eos not in stream.ids
    assert stream.reason is FinishReason.STOP


# ---------------------------------------------------------------------- stop strings


async def test_a_stop_string_across_tokens_ends_the_text_before_it(rig: EngineRig) -> None:
    prompt = rig.prompt(20)
    plain = await rig.run(rig.spec("plain", prompt, sampled(24)))
    count, stop = seam(plain)
    cut = await rig.run(rig.spec("cut", prompt, sampled(24, stop=("never to be seen", stop))))
    assert cut.result == (plain.ids[: count + 1], plain.text[: plain.text.find(stop)], FinishReason.STOP)


@pytest.mark.parametrize("end", ["length", "stop"])
async def test_text_that_a_stop_string_held_back_leaves_with_the_end(rig: EngineRig, end: str) -> None:
    prompt = rig.prompt(20)
    plain = await rig.run(rig.spec("plain", prompt, sampled(24)))
    ids, pieces = plain.ids, plain.pieces
    last = max(at for at in range(2, 24) if pieces[at - 1] and pieces[at] and ids[at] not in ids[:at])
    begins = "".join(pieces[:last])[-3:] + " never to be seen"
    if end == "length":
        asked, reason = sampled(last, stop=(begins,)), FinishReason.LENGTH
    else:
        asked, reason = sampled(24, stop=(begins,), stop_ids=(ids[last],)), FinishReason.STOP
    held = await rig.run(rig.spec("held", prompt, asked))
    assert held.result == (ids[:last], "".join(pieces[:last]), reason)
