"""Ids of a stream's events, which name a client's position for its return. Pure.

    <request id>.<digest of the prompt's ids>:<position>

    start           before the first event
    12              one choice, of which 12 tokens are with the client
    5.3e.0          three choices, of which 5, 3 and 0; the second one's end as well
    5.3             two of three choices have begun (a chat's choices begin one by one)
    end, end.1      the first, the second event of what follows the last token

A position counts the client's tokens, however they were cut into events, so any ingress with the same prompt ids can go
on from it. The digest excludes one that tokenises the conversation differently; an id without digest is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvproto.block_hash import pack_ids
from kvproto.errors import InvalidRequest, PromptChanged
from kvproto.ids import base32

LAST_EVENT_ID = "Last-Event-ID"
_EVERYTHING = 2**62  # more tokens than any choice has
ACCEPT_PARAMETER = "event-ids"  # of text/event-stream in an Accept header: 1 asks for `id:` lines
EVENT_ID = r"^[a-z2-7]{26}(\.[a-z2-7]{8})?:(start|end(\.[0-9])?|[0-9]{1,8}e?(\.[0-9]{1,8}e?){0,127})$"
_EVENT_ID = re.compile(EVENT_ID.replace("$", r"\Z"))


@dataclass(frozen=True, slots=True)
class Position:
    """`counts` are tokens of each choice that has begun; `end` counts the events after the last token. `prompt` is the
    digest of the ids that the stream began from, if the client names it. `number`: of the last event that the client
    has, where events have numbers."""

    counts: tuple[int, ...] = ()
    ended: frozenset[int] = frozenset()
    end: int = 0
    prompt: str = ""
    number: int = -1


START = Position()


def read_event_id(text: str) -> tuple[str, Position]:
    """Raises InvalidRequest for an id that is not ours."""
    if _EVENT_ID.match(text) is None:
        raise InvalidRequest(f"is no event id of this server: {text[:80]!r}", field=LAST_EVENT_ID)
    name, _, place = text.partition(":")
    request, _, prompt = name.partition(".")
    parts = place.split(".")
    if parts[0] == "start":
        return request, START
    if parts[0] == "end":
        return request, Position(end=int(parts[1]) + 1 if len(parts) > 1 else 1, prompt=prompt)
    ended = frozenset(at for at, part in enumerate(parts) if part.endswith("e"))
    return request, Position(tuple(int(part.rstrip("e")) for part in parts), ended, prompt=prompt)


def wants_lines(accept: str | None) -> bool:
    """Whether an Accept header asks for `id:` lines: `text/event-stream; event-ids=1`. OpenAI's routes have them only
    then, as many clients take every line for data."""
    for media in (accept or "").split(","):
        kind, *parameters = (part.strip().lower() for part in media.split(";"))
        if kind == "text/event-stream" and f"{ACCEPT_PARAMETER}=1" in parameters:
            return True
    return False


def prompt_digest(ids: Sequence[int]) -> str:
    return base32(blake2b(pack_ids(ids), digest_size=5).digest())


class EventIds:
    """One reader's position and event ids. Owned by its writer, which changes `counts` and `ended`; `begun` choices
    have had their first event. With `lines` each event begins with an `id:` line."""

    __slots__ = ("_ends", "_prefix", "begun", "counts", "ended", "lines", "skipped_ends")

    def __init__(
        self,
        request: str,
        choices: int,
        at: Position = START,
        *,
        announced: bool = True,
        prompt: str = "",
        lines: bool = True,
    ) -> None:
        """`announced`: a choice begins with an event of its own. `prompt`: `prompt_digest`. Raises PromptChanged if the
        client's stream began from another prompt, InvalidRequest for a position that no such stream has."""
        if at.prompt and prompt and at.prompt != prompt:
            raise PromptChanged(
                "the stream was begun from other prompt ids: this ingress reads the conversation differently. Send the "
                f"request again without {LAST_EVENT_ID}, or to the ingress that it was begun at",
                field=LAST_EVENT_ID,
            )
        if len(at.counts) > choices or (choices == 1 and at.ended) or len(at.ended) == choices:
            raise InvalidRequest(f"is no position of a stream with n = {choices}", field=LAST_EVENT_ID)
        self.lines = lines
        self._prefix = b"%b:" % (f"{request}.{prompt}" if prompt else request).encode()
        self._ends = 0
        self.skipped_ends = at.end
        if at.end:
            self.begun, self.counts, self.ended = choices, [_EVERYTHING] * choices, set(range(choices))
        else:
            self.begun = len(at.counts) if announced else choices
            self.counts = [*at.counts, *[0] * (choices - len(at.counts))]
            self.ended = set(at.ended)

    def begin(self) -> bytes:
        """The id of the event that announces the next choice."""
        self.begun += 1
        return self.here()

    def around(self, choice: int) -> tuple[bytes, bytes]:
        """The id of this choice's tokens before and after the count."""
        if len(self.counts) == 1:
            return self._prefix, b""
        parts = self._parts()
        before = b"".join(part + b"." for part in parts[:choice])
        after = b"".join(b"." + part for part in parts[choice + 1 :])
        return self._prefix + before, after

    def here(self) -> bytes:
        """The id of an event that moves no position."""
        if self.skipped_ends:
            return self._end(self.skipped_ends - 1)
        return self._prefix + (b".".join(self._parts()) or b"start")

    def next_end(self) -> bytes:
        """The id of the next event after the last token."""
        self._ends += 1
        return self._end(self._ends - 1)

    def line(self, event_id: bytes) -> bytes:
        return b"id: %b\n" % event_id if self.lines else b""

    def comment(self, text: bytes) -> bytes:
        """With ids no blank line follows: openai-python's decoder would take it for an event without data. Without ids
        one does: readers that split at blank lines (`vllm bench serve`) would lose the next event."""
        return b": %b\n" % text if self.lines else b": %b\n\n" % text

    def check_reached(self, totals: list[int]) -> None:
        """Raises InvalidRequest for a reader that claims more than a finished stream has."""
        if not self.skipped_ends and any(count > total for count, total in zip(self.counts, totals, strict=True)):
            raise past_the_end()

    def _end(self, number: int) -> bytes:
        return self._prefix + (b"end.%d" % number if number else b"end")

    def _parts(self) -> list[bytes]:
        counts = enumerate(self.counts[: self.begun])
        return [b"%de" % count if at in self.ended else b"%d" % count for at, count in counts]


def past_the_end() -> InvalidRequest:
    return InvalidRequest("is a position past the end of this stream", field=LAST_EVENT_ID)
