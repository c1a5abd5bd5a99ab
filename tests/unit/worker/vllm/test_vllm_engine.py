"""What a vLLM worker asks of its server, and what it makes of what comes. The rest is in `tests/engines`."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from kvfleet.worker.vllm.foreign_blocks import salt_of_root
from kvproto.block_hash import chain
from kvproto.errors import Cancelled, InvalidRequest, Overloaded
from kvproto.messages import Beams, FinishReason, Sampling
from kvsampling.draw import Draw
from kvsampling.sampler import sample
from tests.engines.rigs import greedy, key_of, sampled, whole
from tests.support.vllm_double import toy_model
from tests.support.vllm_double.block_cache import hashes_of
from tests.support.vllm_rig import Starts, VllmRig
from tests.support.waiting import until

LONG = 900
PENALTIES = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "top_k": 200, "top_p": 0.9}


def drawn_here(rig: VllmRig, prompt: tuple[int, ...], sampling: Sampling, choice: int = 0) -> tuple[int, ...]:
    """By the own engine's sampler from the same model."""
    outputs: list[int] = []
    for index in range(sampling.max_tokens):
        row = torch.from_numpy(toy_model.logits(toy_model.after(toy_model.FIRST, [*prompt, *outputs]), rig.vocab_size))
        (token,) = sample(row[None], [Draw(sampling, choice, index, prompt, outputs)])
        assert isinstance(token, int)
        outputs.append(token)
    return tuple(outputs)


async def test_tokens_are_those_that_the_own_engine_would_draw(rig: VllmRig) -> None:
    prompt = rig.prompt(50)
    ways = [greedy(24), sampled(24), sampled(24, 3, **PENALTIES), greedy(24, repetition_penalty=1.4)]
    specs = [rig.spec(f"r{number}", prompt, sampling) for number, sampling in enumerate(ways)]
    specs += [rig.spec("n", prompt, sampled(24, n=2), choice=choice) for choice in range(2)]
    for spec, stream in zip(specs, await rig.run_all(*specs), strict=True):
        assert stream.ids == drawn_here(rig, prompt, spec.sampling, spec.choice)


async def test_a_stream_that_is_cut_goes_on_beside_another_server(starts: Starts) -> None:
    here, there = await starts(), await starts(blocks=60, step_tokens=40)
    for number, sampling in enumerate((sampled(40), sampled(40, 3, **PENALTIES), greedy(40))):
        spec = here.spec(f"r{number}", here.prompt(50, number), sampling)
        uncut = await here.run(spec)
        for count in (1, 13, 39):
            sent = len("".join(uncut.pieces[:count]))
            rest = await there.run(replace(spec, attempt=count, output_ids=uncut.ids[:count], text_sent=sent))
            assert rest.result == (uncut.ids[count:], uncut.text[sent:], uncut.reason)


async def test_another_tenant_neither_hits_nor_sees(rig: VllmRig) -> None:
    prompt = rig.prompt(100)
    mine = await rig.run(rig.spec("mine", prompt, greedy(8)))
    theirs = await rig.run(rig.spec("theirs", prompt, greedy(8), root=rig.other_root))
    assert (mine.cached_tokens, theirs.cached_tokens) == (0, 0)
    assert mine.result == theirs.result
    assert [body["cache_salt"] for body in rig.double.bodies] == [*map(salt_of_root, (rig.root, rig.other_root))]
    assert await rig.engine.erase(rig.other_root, prompt, 0) > 0
    again = await rig.run(rig.spec("again", prompt, greedy(8)))
    assert again.cached_tokens == 96


async def test_a_second_turn_hits_the_first_and_an_erase_is_vllms_too(rig: VllmRig) -> None:
    prompt = rig.prompt(100)
    first = await rig.run(rig.spec("first", prompt, greedy(40)))
    history = [*prompt, *first.ids]
    second = await rig.run(rig.spec("second", [*history, *rig.prompt(10, 2)], greedy(4)))
    assert second.cached_tokens == whole(139)
    (salt,) = {body["cache_salt"] for body in rig.double.bodies}
    hashes = hashes_of(salt, history, 32)
    cache = rig.double.engine.cache
    assert len(cache.find(hashes)) == 4
    await until(lambda: len(rig.engine.blocks) >= 8)
    assert await rig.engine.erase(rig.root, [*history, *rig.prompt(10, 2)], 0) == 8
    assert cache.find(hashes) == []
    assert (await rig.run(rig.spec("third", prompt, greedy(4)))).cached_tokens == 0


async def test_a_wrong_block_goes_with_all_that_continues_it(rig: VllmRig) -> None:
    prompt = rig.prompt(100)
    await rig.run(rig.spec("first", prompt, greedy(4)))
    await rig.run(rig.spec("other", [*prompt, *rig.prompt(100, 2)], greedy(4)))
    hashes = chain(rig.root, prompt, 16)
    rig.engine.discard(hashes[4])
    await until(lambda: rig.engine.blocks.depth(hashes) == 4)
    again = await rig.run(rig.spec("again", [*prompt, *rig.prompt(100, 2)], greedy(4)))
    assert again.cached_tokens == 64


async def test_a_cancel_ends_it_within_a_step(starts: Starts) -> None:
    rig = await starts(step_s=0.05)
    one = rig.spec("r", rig.prompt(40), greedy(LONG))
    rig.submit(one)
    await rig.until_tokens(one)
    steps = rig.double.engine.steps
    rig.engine.cancel("r", 0)
    await until(lambda: not rig.double.engine.scheduler.has_work, pause_s=0.001)
    assert rig.double.engine.steps - steps <= 1
    await until(lambda: rig.engine.cancel_to_free.count == 1)
    assert isinstance(rig.stream(key_of(one)).error, Cancelled)


async def test_several_choices_compute_their_prompt_once(rig: VllmRig) -> None:
    before = rig.double.engine.scheduler.computed_total
    prompt = rig.prompt(200)
    specs = [rig.spec("r", prompt, sampled(8, n=4), choice=choice) for choice in range(4)]
    await rig.run_all(*specs)
    computed = rig.double.engine.scheduler.computed_total - before
    assert computed <= 200 + 4 * 8 + 3 * 32  # the part of a block that is not full is each one's own


async def test_choices_that_wait_for_the_first_give_way_with_it_or_not_at_all(starts: Starts) -> None:
    """Nothing of them is at vLLM, which counts no place for them."""
    rig = await starts(slots=1)
    blocker = rig.spec("blocker", rig.prompt(20), greedy(LONG), priority=50)
    rig.submit(blocker)
    await rig.until_tokens(blocker)
    low = [rig.spec("low", rig.prompt(20, 1), sampled(4, n=3), choice=choice) for choice in range(3)]
    rig.submit(*low, rig.spec("high", rig.prompt(20, 2), greedy(4), priority=5))
    assert await rig.engine.make_room("high", 0, 1) == {("low", 0)}
    for spec in low:
        assert isinstance(rig.stream(key_of(spec)).error, Overloaded)
    rig.engine.cancel("blocker", 0)
    await rig.until(*rig.owed)
    assert rig.stream(("high", 0, 0)).reason is FinishReason.LENGTH
    assert len(rig.double.bodies) <= 3  # blocker, high, and the first choice of low


async def test_choices_that_wait_for_the_first_are_paused_and_let_go_with_it(starts: Starts) -> None:
    rig = await starts(slots=1)
    plain = [rig.spec("plain", rig.prompt(20, 1), sampled(6, n=3), choice=choice) for choice in range(3)]
    expected = [stream.result for stream in await rig.run_all(*plain)]
    blocker = rig.spec("blocker", rig.prompt(20), greedy(LONG), priority=50)
    gone = [rig.spec("gone", rig.prompt(20, 2), sampled(6, n=3), choice=choice) for choice in range(3)]
    paused = [replace(spec, request="paused") for spec in plain]
    rig.submit(blocker)
    await rig.until_tokens(blocker)
    rig.submit(*gone, *paused)
    rig.engine.pause("paused", 0)
    await rig.let_go(*gone)
    rig.engine.cancel("blocker", 0)
    await until(lambda: not rig.double.engine.scheduler.has_work)
    assert [rig.stream(key_of(spec)).ids for spec in (*gone, *paused)] == [()] * 6
    rig.engine.resume("paused", 0)
    await rig.until(*map(key_of, paused))
    assert [rig.stream(key_of(spec)).result for spec in paused] == expected


async def test_one_whose_first_choice_fails_goes_on_without_it(starts: Starts) -> None:
    rig = await starts(slots=1)
    blocker = rig.spec("blocker", rig.prompt(20), greedy(LONG), priority=50)
    rig.submit(blocker)
    await rig.until_tokens(blocker)
    choices = [rig.spec("r", rig.prompt(20, 1), sampled(6, n=2), choice=choice) for choice in range(2)]
    rig.submit(replace(choices[0], deadline=time.monotonic() + 0.05), choices[1])
    await rig.until(key_of(choices[0]))
    rig.engine.cancel("blocker", 0)
    await rig.until(key_of(choices[1]))
    assert rig.stream(key_of(choices[1])).ids == drawn_here(rig, choices[1].prompt_ids, choices[1].sampling, 1)


async def test_beams_are_refused(rig: VllmRig) -> None:
    """Placement and clients ask none of it; whoever asks a worker itself is told."""
    beams = rig.spec("r", rig.prompt(20), greedy(6, beams=Beams(2)))
    rig.submit(beams)
    await rig.until(key_of(beams))
    error = rig.stream(key_of(beams)).error
    assert isinstance(error, InvalidRequest)
    assert error.field == "use_beam_search"


async def test_what_is_preempted_goes_on_as_if_nothing_had_been(starts: Starts) -> None:
    roomy, tight = await starts(), await starts(blocks=10)
    specs = [roomy.spec(f"r{number}", roomy.prompt(60, number), sampled(120, number)) for number in range(3)]
    expected = await roomy.run_all(*specs)
    found = await tight.run_all(*specs)
    assert [stream.result for stream in found] == [stream.result for stream in expected]
    load, _ = tight.engine.measured
    assert load.preemptions_total > 0
    assert load.evictions_total > 0
    assert load.generated_tokens_total == 360


async def test_a_prompt_in_chunks_and_its_rates(starts: Starts) -> None:
    whole_one, chunked = await starts(), await starts(step_tokens=48, step_s=0.003)
    spec = whole_one.spec("r", whole_one.prompt(500), sampled(30))
    expected = await whole_one.run(spec)
    assert (await chunked.run(spec)).result == expected.result
    _, rates = chunked.engine.measured
    assert 0 < rates.prefill_tokens_per_s < 48 / 0.003
    assert 0 < rates.decode_steps_per_s < 1 / 0.003


async def test_a_deadline_in_vllms_queue_and_in_the_middle(starts: Starts) -> None:
    rig = await starts(slots=1)
    runs = rig.spec("runs", rig.prompt(20), greedy(LONG), deadline=time.monotonic() + 0.3)
    waits = rig.spec("waits", rig.prompt(20, 1), greedy(4), deadline=time.monotonic() + 0.2)
    rig.submit(runs)
    await rig.until_tokens(runs)
    rig.submit(waits)
    await rig.until(key_of(runs), key_of(waits))
    for spec in (runs, waits):
        assert rig.stream(key_of(spec)).error.code == "deadline_exceeded"
    assert rig.stream(key_of(waits)).ids == ()
    await until(lambda: not rig.double.engine.scheduler.has_work)
