"""Positions of clients: what was written as an id is read as what the client has, however it was cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.ingress.answers.native_events import NativeForm
from kvfleet.ingress.answers.openai_events import OpenAiForm
from kvfleet.ingress.runs.event_ids import START, EventIds, Position, prompt_digest, read_event_id
from kvfleet.ingress.runs.jobs import EventReader, Form
from kvfleet.ingress.runs.repeats import key_secret, name_request, request_of_key
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.errors import InvalidRequest, PromptChanged
from kvproto.messages import ChoiceFinished, Finished, FinishReason, Started, Tokens

R = "a" * 26
STARTED = Started(R, 0, "w1", 7, {})


@pytest.mark.parametrize(
    ("said", "position"),
    [
        ("start", START),
        ("0", Position((0,))),
        ("12", Position((12,))),
        ("5.3e.0", Position((5, 3, 0), frozenset({1}))),
        ("end", Position(end=1)),
        ("end.2", Position(end=3)),
    ],
)
def test_positions(said: str, position: Position) -> None:
    assert read_event_id(f"{R}:{said}") == (R, position)


def test_positions_that_no_such_stream_has() -> None:
    for position in (Position((1, 2, 3)), Position((1, 2), frozenset({0, 1}))):
        with pytest.raises(InvalidRequest, match="Last-Event-ID"):
            EventIds("r", 2, position)
    with pytest.raises(InvalidRequest):
        EventIds("r", 1, Position((1,), frozenset({0})))


def frames_of(lengths: list[int], order: list[int]) -> list[Any]:
    """Tokens of each choice in some order, an end behind each choice's last."""
    frames: list[Any] = [STARTED]
    done = [0] * len(lengths)
    for at in [*order, *(at for at, length in enumerate(lengths) for _ in range(length))]:
        at %= len(lengths)
        if done[at] < lengths[at]:
            piece = "" if done[at] % 3 == 1 else f"c{at}t{done[at]} "  # some text is held back
            frames.append(Tokens(R, 0, at, done[at], (done[at],), (piece,)))
            done[at] += 1
            if done[at] == lengths[at] and len(lengths) > 1:
                frames.append(ChoiceFinished(R, 0, at, FinishReason.LENGTH, done[at]))
    return [*frames, Finished(R, 0, FinishReason.LENGTH, 7, sum(lengths))]


def events_of(form: Form, at: Position, batches: list[list[Any]], n: int) -> list[tuple[str, bytes]]:
    """(id, data) of everything that a reader there gets, read batch by batch; a chunk's data says its id too, which is
    left out: other choices' counts are in it."""
    transcript, out = Transcript.of(n), list[bytes]()
    reader = EventReader(form.writer(at, id_lines=True))
    for batch in batches:
        transcript.take(batch)
        if transcript.finished is None:
            reader.advance(transcript, out)
    reader.finish(transcript, out)
    blocks = b"".join(out).split(b"\n\n")[:-1]
    pairs = [block.split(b"\n") for block in blocks]
    found = [(event_id.removeprefix(b"id: "), data) for event_id, data in pairs]
    assert all(b'"event_id":"%b"' % event_id in data for event_id, data in found if b'"choices"' in data)
    return [(event_id.decode(), data.replace(event_id, b"")) for event_id, data in found]


@given(data=st.data())
def test_whoever_comes_back_gets_what_he_lacks_and_nothing_twice(data: st.DataObject) -> None:
    """Cut behind any event, in any order of choices and any batches, before and after: no event twice, none lost."""
    n = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    kind = data.draw(st.sampled_from(["chat", "completion", "native"]))
    form: Form = OpenAiForm(R, "m", 5, "fp", kind == "chat", n, include_usage=data.draw(st.booleans()))
    if kind == "native":
        n, lengths, form = 1, lengths[:1], NativeForm(R, "s", "p")

    def batches() -> list[list[Any]]:
        frames = frames_of(lengths, data.draw(st.lists(st.integers(0, n - 1), max_size=12)))
        cuts = sorted(data.draw(st.lists(st.integers(1, len(frames)), max_size=4)))
        return [frames[a:b] for a, b in zip([0, *cuts], [*cuts, len(frames)], strict=True)]

    def by_choice(events: list[tuple[str, bytes]]) -> dict[Any, list[bytes]]:
        out: dict[Any, list[bytes]] = {}
        for event_id, one in events:
            index = next((at for at in range(n) if b'"index":%d' % at in one), "end")
            out.setdefault("end" if ":end" in event_id else index, []).append(one)
        return out

    whole = events_of(form, START, batches(), n)
    assert len({event_id for event_id, _ in whole}) == len(whole)
    cut = data.draw(st.integers(1, len(whole)))
    before = whole[:cut]
    request, at = read_event_id(before[-1][0])
    assert request == R
    after = events_of(form, at, batches(), n)
    ended_last = [
        c for c, events in by_choice(whole).items() if c != "end" and not any(b'"length"' in e for e in events)
    ]
    said, expected = by_choice(before + after), by_choice(whole)
    if n == 1 or by_choice(after).get("end") == expected["end"][len(by_choice(before).get("end", [])) :]:
        assert said == expected
    else:  # the choices ended in another order: the one whose end is the answer's is another
        texts = [
            [one for one in events.get(c, []) if b'"length"' not in one]
            for c in range(n)
            for events in (said, expected)
        ]
        assert texts[::2] == texts[1::2]
        assert sum(b'"length"' in one for events in said.values() for one in events) == n
    assert n == 1 or len(ended_last) == 1


def test_ids_while_nothing_has_come() -> None:
    assert EventIds(R, 2).here() == f"{R}:start".encode()
    assert EventIds(R, 2, announced=False).here() == f"{R}:0.0".encode()
    ids = EventIds(R, 2)
    assert [ids.begin(), ids.begin()] == [f"{R}:0".encode(), f"{R}:0.0".encode()]


def test_a_key_makes_the_same_request_everywhere_and_another_one_for_another_tenant() -> None:
    assert request_of_key("t", "k") == request_of_key("t", '"k"') == name_request("t", None, "k").request
    assert len({request_of_key(*one) for one in (("t", "kx"), ("u", "kx"), ("t", "ky"), ("tk", "x"))}) == 4
    assert read_event_id(request_of_key("t", "k") + ":3")[1] == Position((3,))
    assert name_request("t", "", None).at == START
    with pytest.raises(InvalidRequest, match="Last-Event-ID: is of another request"):
        name_request("t", f"{R}:3", "k")


def test_who_guesses_anothers_key_does_not_know_its_request() -> None:
    one, everywhere = key_secret(b"the fleet's", one_tenant=False)
    assert everywhere
    assert key_secret(b"the fleet's", one_tenant=True) == (one, True), "every ingress has the same"
    assert key_secret(b"x" * 1000, one_tenant=False)[1], "of any length"
    assert request_of_key("t", "order-17", one) == name_request("t", None, "order-17", one).request
    assert request_of_key("t", "order-17", one) != request_of_key("t", "order-17")
    another = key_secret(b"another", one_tenant=False)[0]
    assert request_of_key("t", "order-17", one) != request_of_key("t", "order-17", another)
    own, everywhere = key_secret(b"", one_tenant=False)
    assert not everywhere
    assert own != key_secret(b"", one_tenant=False)[0]
    assert key_secret(b"", one_tenant=True) == (b"", True)


def test_a_sealed_id_is_its_tenants_alone() -> None:
    secret, _ = key_secret(b"the fleet's", one_tenant=False)
    drawn = name_request("t", None, None, secret, sealed=True).request
    keyed = name_request("t", None, "k", secret, sealed=True).request
    assert keyed == name_request("t", None, "k", secret, sealed=True).request
    for request in (drawn, keyed):
        read_event_id(f"{request}:3")
        assert name_request("t", f"{request}:3", None, secret, sealed=True).request == request
        for tenant, said in (("u", request), ("t", R), ("t", request[:-1] + ("b" if request[-1] == "a" else "a"))):
            for place in ("3", "start"):
                with pytest.raises(InvalidRequest, match="of no request of this tenant"):
                    name_request(tenant, f"{said}:{place}", None, secret, sealed=True)
    assert name_request("t", f"{keyed}:3", "k", secret, sealed=True).keyed
    assert len({name_request("t", None, None, secret, sealed=True).request for _ in range(100)}) == 100


def test_an_id_says_which_prompt_its_stream_was_begun_from() -> None:
    here, there = prompt_digest((1, 2, 3)), prompt_digest((1, 2, 4))
    ids = NativeForm(R, "s", "p", prompt_digest=here).writer().ids
    ids.begin()
    said = ids.here().decode()
    assert said == f"{R}.{here}:0"
    request, at = read_event_id(said)
    assert (request, at) == (R, Position((0,), prompt=here))
    for form in (NativeForm(R, "s", "p", prompt_digest=here), NativeForm(R, "s", "p")):
        form.writer(at)
        form.writer(Position((3,)))  # whose id does not say
    with pytest.raises(PromptChanged, match="Last-Event-ID"):
        NativeForm(R, "s", "p", prompt_digest=there).writer(at)
    for end in ("end", "end.1"):
        assert read_event_id(f"{R}.{here}:{end}")[1].prompt == here
    assert read_event_id(f"{R}.{here}:start")[1] == START, "nothing was read of it"
    for wrong in (f"{R}.:1", f"{R}.abc:1", f"{R}.{here}{here}:1", f"{R}.{here.upper()}1:1"):
        with pytest.raises(InvalidRequest):
            read_event_id(wrong)
