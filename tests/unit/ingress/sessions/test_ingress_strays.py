"""What is remembered of what a session's requests computed beside its history."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from ingress_build import MemoryBucket
from test_ingress_sessions import Rig, locked

from kvfleet.ingress.prompts.chat_splice import agreeing
from kvfleet.ingress.runs import transcript as strays
from kvfleet.ingress.runs.transcript import beside, bounded, moved, settled
from kvfleet.ingress.sessions.sessions import Sessions
from kvproto.errors import SessionBusy, Unavailable
from kvproto.messages import SessionHead, Stray

Ids = tuple[int, ...]


def chains(found: list[Stray], history: Ids) -> set[Ids]:
    return {history[: one.start] + one.ids for one in found}


def test_agreeing_is_the_longest_common_beginning() -> None:
    chance = random.Random(1)
    for _ in range(500):
        one, other = (tuple(chance.choices((0, 1), k=chance.randint(0, 9))) for _ in range(2))
        slow = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert agreeing(one, other) == slow


def test_nothing_that_was_computed_is_forgotten_whatever_the_history_becomes() -> None:
    """Every sequence ever computed begins one that is the history or remembered, and what is remembered was."""
    chance = random.Random(2)
    for _ in range(300):
        history: Ids = ()
        known: list[Stray] = []
        computed: set[Ids] = set()
        for _ in range(6):
            keep = chance.randint(0, len(history))
            prompt = history[: chance.choice((keep, len(history)))] + tuple(chance.choices((0, 1), k=3))
            outputs = [tuple(chance.choices((0, 1), k=chance.randint(0, 3))) for _ in range(chance.randint(1, 3))]
            computed |= {prompt + ids for ids in outputs}
            if chance.random() < 0.5:
                known = settled([*known, *beside(history, prompt, outputs)], history)
            else:
                before, history = history, prompt + outputs[0]
                known = settled([*moved(known, before, history), *beside(history, prompt, outputs)], history)
            remembered = {history, *chains(known, history)}
            assert all(any(whole[: len(one)] == one for whole in remembered) for one in computed)
            assert all(any(whole[: len(one)] == one for whole in computed) for one in remembered)
            assert len(chains(known, history)) == len(known)
            assert all(one.ids and history[one.start : one.start + 1] != one.ids[:1] for one in known)


def test_the_oldest_give_way() -> None:
    many = [Stray(n, (n,)) for n in range(strays.MAX_STRAYS + 3)]
    kept, dropped = bounded(many)
    assert (dropped, kept) == (many[:3], many[3:])
    huge = Stray(0, tuple(range(strays.MAX_IDS + 1)))
    assert bounded([many[0], huge]) == ([many[0]], [huge])
    halves = [Stray(n, (n,) * (strays.MAX_IDS // 2)) for n in range(3)]
    assert bounded(halves) == (halves[1:], halves[:1])


class Forgetting(Rig):
    def __init__(self) -> None:
        self.forgotten: list[tuple[str, str, Ids, int]] = []
        super().__init__()

    def ingress(self, name: str) -> Sessions:
        sessions = super().ingress(name)
        sessions.forget = lambda key, head, ids, keep: self.forgotten.append((key, head.model, ids, keep))
        return sessions

    @property
    def bucket_keys(self) -> int:
        assert isinstance(self.bucket, MemoryBucket)
        return len(self.bucket.keys())


async def test_strays_are_kept_with_the_head_and_go_with_it() -> None:
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1, 2))
    for ids in ((3, 4), (3, 5), (3, 4, 6)):
        session = await rig.two.read("t", "s")
        turn = await rig.two.lock(session, "m", "cut")
        await rig.two.abandon(turn, (), [Stray(3, ids)])
    head = (await rig.one.read("t", "s")).head
    assert head is not None
    assert (head.strays, head.left_request, head.turn) == (5, "cut", None)
    await rig.turn(rig.one, (3, 4))
    erased = await rig.one.erase("t", "s")
    assert erased.ids == (0, 1, 2, 3, 4)
    assert set(erased.strays) == {Stray(4, (5,)), Stray(5, (6,))}
    assert rig.bucket_keys == 0
    assert not rig.forgotten


async def test_a_history_that_is_replaced_leaves_what_it_ended_with() -> None:
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1, 2, 3))
    session = await rig.one.read("t", "s")
    async with locked(rig.one, session, "m", "r") as turn:
        await rig.one.commit(turn, "m", (0, 1, 7), "w1", strays=[Stray(2, (8,))])
    erased = await rig.one.erase("t", "s")
    assert set(erased.strays) == {Stray(2, (2, 3)), Stray(2, (8,))}
    assert rig.bucket_keys == 0


async def test_another_models_blocks_are_forgotten_at_once() -> None:
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1, 2, 3))
    session = await rig.one.read("t", "s")
    async with locked(rig.one, session, "other", "r") as turn:
        await rig.one.commit(turn, "other", (0, 1, 7), "w1")
    assert rig.forgotten == [(session.key, "m", (0, 1, 2, 3), 0)]
    assert not (await rig.one.erase("t", "s")).strays


async def test_what_is_too_much_is_forgotten_at_once() -> None:
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1))
    session = await rig.one.read("t", "s")
    turn = await rig.one.lock(session, "m", "cut")
    much = (9,) * (strays.MAX_IDS + 1)
    await rig.one.abandon(turn, (), [Stray(2, (4,)), Stray(2, much)])
    assert rig.forgotten == [(session.key, "m", (0, 1, *much), 2)]
    head = (await rig.one.read("t", "s")).head
    assert isinstance(head, SessionHead)
    assert head.strays == 1


async def test_a_first_turn_that_computed_nothing_leaves_nothing() -> None:
    rig = Forgetting()
    for left, keys in (([], 0), ([Stray(0, (1, 2))], 2)):
        turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "cut")
        await rig.one.abandon(turn, (), left)
        assert rig.bucket_keys == keys
    assert (await rig.one.erase("t", "s")).strays == (Stray(0, (1, 2)),)
    assert rig.bucket_keys == 0


async def test_what_a_turn_left_is_remembered_though_jetstream_is_away_for_a_moment() -> None:
    rig = Rig()
    rig.one.limits = replace(rig.one.limits, commit_timeout_s=5.0)
    turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    rig.bucket.away = True
    ending = asyncio.create_task(rig.one.abandon(turn, strays=(Stray(0, (1, 2, 3)),)))
    await asyncio.sleep(0.05)
    assert not ending.done()
    rig.bucket.away = False
    await ending
    session = await rig.two.read("t", "s")
    assert session.head is not None
    assert session.head.turn is None
    assert (await rig.two.erase("t", "s")).strays == (Stray(0, (1, 2, 3)),)


async def test_what_a_lost_turn_left_is_forgotten_at_once() -> None:
    """Its session was deleted meanwhile, or went on without it: the record is not its own any more."""
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1))
    for is_deleted, keep in ((False, 2), (True, 0)):
        turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "lost")
        rig.alive.discard("one")
        if is_deleted:
            await rig.two.erase("t", "s")
        else:
            other = await rig.two.lock(await rig.two.read("t", "s"), "m", "other")
            await rig.two.abandon(other)
        await rig.one.abandon(turn, ("west",), [Stray(2, (5, 6))])
        assert rig.forgotten.pop() == (turn.session.key, "m", (0, 1, 5, 6), keep)
        rig.alive.add("one")
    assert rig.bucket_keys == 0


async def test_what_a_turn_left_stays_that_another_ingress_goes_on_with() -> None:
    rig = Forgetting()
    turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    shared = await rig.two.lock(await rig.two.read("t", "s"), "m", "r")
    await rig.one.abandon(turn, (), [Stray(0, (5, 6))])
    await rig.two.commit(shared, "m", (5, 6, 7), "w1")
    await rig.one.abandon(turn, (), [Stray(0, (5, 6))])
    assert not rig.forgotten


async def test_what_a_turn_left_is_forgotten_while_jetstream_is_away() -> None:
    rig = Forgetting()
    turn = await rig.one.lock(await rig.one.read("t", "s"), "m", "r")
    rig.bucket.away = True
    await rig.one.abandon(turn, (), [Stray(0, (5, 6))])
    assert rig.forgotten == [(turn.session.key, "m", (5, 6), 0)]


async def test_a_lost_turn_leaves_no_records() -> None:
    """The history that it would have replaced the session's with is written before its head would be."""
    rig = Forgetting()
    await rig.turn(rig.one, (3, 4))
    replacing = await rig.one.lock(await rig.one.read("t", "s"), "m", "replacing")
    rig.alive.discard("one")
    await rig.turn(rig.two, (5,))
    before = rig.bucket_keys
    with pytest.raises(SessionBusy):
        await rig.one.commit(replacing, "m", (1, 2), "w1")
    assert rig.bucket_keys == before


async def test_a_history_that_is_committed_by_the_second_try_has_one_set_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Forgetting()
    await rig.turn(rig.one, (0, 1))
    rig.one.limits = replace(rig.one.limits, commit_timeout_s=5.0)
    update, tries = rig.bucket.update, iter((True, False))

    async def heads_fail_once(key: str, value: bytes, revision: int) -> int:
        if key.count(".") == 1 and next(tries):
            raise Unavailable("no answer")
        return await update(key, value, revision)

    async with locked(rig.one, await rig.one.read("t", "s"), "m", "r") as turn:
        monkeypatch.setattr(rig.bucket, "update", heads_fail_once)
        await rig.one.commit(turn, "m", (7, 8), "w1")
    monkeypatch.undo()
    assert (await rig.one.read("t", "s")).ids == (7, 8)
    await rig.one.erase("t", "s")
    assert rig.bucket_keys == 0
