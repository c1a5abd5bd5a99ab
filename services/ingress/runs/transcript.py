"""What one request has brought so far, choice by choice: an append-only log for its readers. Pure.

After a cut the request goes on from it: `continuations`. What a session's requests computed beside its history (cut
turns, other choices) are its strays:

    history   0 1 2 3 4 5 6 7 8
                    │   └ 6' 7'         Stray(start=6, ids=(6', 7'))
                    └ 4' 5' 6'          Stray(start=4, ids=(4', 5', 6'))

They are remembered so that their blocks can be erased with the session's. Beyond a bound the oldest are erased at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvfleet.ingress.limits.admission import STREAMED, WHOLE, TokenCosts
from kvfleet.ingress.prompts.chat_splice import agreeing
from kvproto.messages import (
    ChoiceFinished,
    Continuation,
    Finished,
    FinishReason,
    PromptScores,
    Started,
    StopToken,
    Stray,
    TokenLogprobs,
    Tokens,
)
from kvproto.regions import qualify, split
from kvproto.streams.stream import Event

BASE_BYTES = 2048
MAX_STRAYS = 64
MAX_IDS = 32_768  # of all strays of a session together

Ids = tuple[int, ...]


@dataclass(slots=True)
class ChoiceTranscript:
    """A piece of text for each id, and its log probabilities where the request asks for them."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token: StopToken | None = None  # that ended it

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_scored(self) -> bool:
        """Whether every token has log probabilities; workers of older versions send none."""
        return len(self.logprobs) == len(self.ids)


@dataclass(slots=True)
class Transcript:
    """`ends` are those of several choices, in the order in which they ended. `prompt_scores` will be `scores_due`, of
    all tokens of the prompt but the first; each choice's answer may repeat them."""

    choices: list[ChoiceTranscript] = field(default_factory=lambda: [ChoiceTranscript()])
    started: Started | None = None
    finished: Finished | None = None
    ends: list[ChoiceFinished] = field(default_factory=list)
    size: int = BASE_BYTES  # approximate bytes of memory, at least those that are here
    costs: TokenCosts = STREAMED
    regions: tuple[str, ...] = ()  # other ones, whose workers worked on it
    ended_in: str = ""  # the region of the last worker; "": at home
    begun: bool = False  # a worker took it, and may have computed some of it
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    scores_due: int = 0

    @classmethod
    def of(cls, choices: int, costs: TokenCosts = STREAMED, scores_due: int = 0) -> Transcript:
        return cls([ChoiceTranscript() for _ in range(choices)], costs=costs, scores_due=scores_due)

    def emptied(self) -> Transcript:
        """Who worked on it, without what it brought."""
        empty = Transcript.of(len(self.choices))
        empty.started, empty.regions, empty.ended_in = self.started, self.regions, self.ended_in
        return empty

    @property
    def is_open(self) -> bool:
        """Whether all is there that comes before the first token."""
        return self.started is not None and len(self.prompt_scores) >= self.scores_due

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the first choice, with which a conversation goes on."""
        return tuple(self.choices[0].ids)

    @property
    def totals(self) -> list[int]:
        return [len(choice.ids) for choice in self.choices]

    def take(self, batch: Iterable[Event]) -> int:
        """Append events; returns how many tokens they brought. A later attempt's `Started` is ignored."""
        count = 0
        costs = self.costs
        for event in batch:
            if type(event) is Tokens:
                said = self.choices[event.choice]
                said.ids.extend(event.ids)
                said.pieces.extend(event.text)
                count += len(event.ids)
                if event.logprobs:
                    said.logprobs.extend(event.logprobs)
                    tops = len(event.logprobs[0].top_ids)
                    self.size += len(event.ids) * (costs.logprobs + costs.alternative * tops)
            elif isinstance(event, PromptScores):
                self.prompt_scores.extend(event.logprobs)
                each = WHOLE.of(len(event.logprobs), len(event.logprobs[0].top_ids))  # sent in one piece
                self.size += len(self.choices) * each
            elif isinstance(event, Started):
                self.begun = True
                if self.started is None:
                    self.started = event
            elif isinstance(event, ChoiceFinished):
                if self.choices[event.choice].reason is None:
                    self.choices[event.choice].reason = event.reason
                    self.choices[event.choice].stop_token = event.stop_token
                    self.ends.append(event)
            elif isinstance(event, Finished):
                self.finished = event
                self.choices[0].reason, self.choices[0].stop_token = event.reason, event.stop_token
        self.size += count * costs.token
        return count

    def served_by(self, worker: str | None) -> None:
        """`worker` as this process calls it, None before a worker has it."""
        self.ended_in = split(worker or "")[0]
        if self.ended_in and self.ended_in not in self.regions:
            self.regions = (*self.regions, self.ended_in)

    @property
    def worker(self) -> str:
        """The worker that finished it, as this process calls it."""
        assert self.finished is not None
        return qualify(self.ended_in, self.finished.worker) if self.ended_in else self.finished.worker

    def strays(self, history: tuple[int, ...], prompt: tuple[int, ...]) -> list[Stray]:
        return beside(history, prompt, (choice.ids for choice in self.choices)) if self.begun else []

    def continuations(self) -> tuple[Continuation, ...]:
        """Empty where nothing has come yet."""
        if not any(choice.ids or choice.reason for choice in self.choices):
            return ()
        return tuple(
            Continuation(tuple(choice.ids), sum(map(len, choice.pieces)), choice.reason) for choice in self.choices
        )


def beside(history: Ids, prompt: Ids, outputs: Iterable[Sequence[int]]) -> list[Stray]:
    """A request's choices as strays of a history that does not take them."""
    start = agreeing(history, prompt)
    return [Stray(start, prompt[start:] + tuple(ids)) for ids in outputs]


def moved(strays: Iterable[Stray], before: Ids, history: Ids) -> list[Stray]:
    """The strays beside `history`, which replaces `before`: the rest of `before` becomes one of them."""
    fork = agreeing(before, history)
    return [Stray(fork, before[fork:])] + [
        one if one.start <= fork else Stray(fork, before[fork : one.start] + one.ids) for one in strays
    ]


def settled(strays: Iterable[Stray], history: Ids) -> list[Stray]:
    """Each from where it leaves the history, in the same order, without those that begin another one."""
    found: list[Stray] = []
    for one in strays:
        same = agreeing(one.ids, history[one.start : one.start + len(one.ids)])
        stray = Stray(one.start + same, one.ids[same:])
        if not any(_begins(other, stray) for other in found):
            found = [other for other in found if not _begins(stray, other)]
            found.append(stray)
    return [one for one in found if one.ids]


def bounded(strays: Iterable[Stray]) -> tuple[list[Stray], list[Stray]]:
    """Those to remember, and those to drop."""
    kept: list[Stray] = []
    dropped: list[Stray] = []
    for one in strays:
        (kept if len(one.ids) <= MAX_IDS else dropped).append(one)
    while len(kept) > MAX_STRAYS or ids_of(kept) > MAX_IDS:
        dropped.append(kept.pop(0))
    return kept, dropped


def ids_of(strays: Iterable[Stray]) -> int:
    return sum(len(one.ids) for one in strays)


def _begins(whole: Stray, part: Stray) -> bool:
    return whole.start == part.start and whole.ids[: len(part.ids)] == part.ids
