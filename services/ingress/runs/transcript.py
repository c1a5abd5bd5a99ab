"""What one request has brought so far, choice by choice: the log that its readers, now and later, read. Pure.

It only grows. After a cut the request goes on from it: `continuations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvfleet.ingress.limits.run_memory import STREAMED, TokenCosts
from kvfleet.ingress.runs.strays import beside
from kvproto.messages import ChoiceFinished, Continuation, Finished, FinishReason, Started, Stray, TokenLogprobs, Tokens
from kvproto.regions import qualify, split
from kvproto.streams.stream import Event

BASE_BYTES = 2048


@dataclass(slots=True)
class ChoiceTranscript:
    """What one choice has brought: a piece of text for each id, and its log probabilities where they were asked for."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_scored(self) -> bool:
        """Whether every token has its log probabilities: none has from a worker of an older version."""
        return len(self.logprobs) == len(self.ids)


@dataclass(slots=True)
class Transcript:
    """What one request has brought. `ends` are those of its choices, in their order, where there are several."""

    choices: list[ChoiceTranscript] = field(default_factory=lambda: [ChoiceTranscript()])
    started: Started | None = None
    finished: Finished | None = None
    ends: list[ChoiceFinished] = field(default_factory=list)
    size: int = BASE_BYTES  # bytes of memory, about: at least what is here
    costs: TokenCosts = STREAMED
    regions: tuple[str, ...] = ()  # other ones, whose workers worked on it
    ended_in: str = ""  # the region of the last worker; "": at home
    begun: bool = False  # a worker took it, and may have computed some of it

    @classmethod
    def of(cls, choices: int, costs: TokenCosts = STREAMED) -> Transcript:
        return cls([ChoiceTranscript() for _ in range(choices)], costs=costs)

    def emptied(self) -> Transcript:
        """Of one that is given up: who worked on it, and nothing of what it brought."""
        empty = Transcript.of(len(self.choices))
        empty.started, empty.regions, empty.ended_in = self.started, self.regions, self.ended_in
        return empty

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the first choice: it is the one that a conversation goes on with."""
        return tuple(self.choices[0].ids)

    @property
    def totals(self) -> list[int]:
        return [len(choice.ids) for choice in self.choices]

    def take(self, batch: Iterable[Event]) -> int:
        """Append events; returns how many tokens they brought. A later attempt's `Started` says nothing new."""
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
            elif isinstance(event, Started):
                self.begun = True
                if self.started is None:
                    self.started = event
            elif isinstance(event, ChoiceFinished):
                if self.choices[event.choice].reason is None:
                    self.choices[event.choice].reason = event.reason
                    self.ends.append(event)
            elif isinstance(event, Finished):
                self.finished = event
                self.choices[0].reason = event.reason
        self.size += count * costs.token
        return count

    def served_by(self, worker: str | None) -> None:
        """Note where it runs: `worker` as this process calls it, None before a worker has it."""
        self.ended_in = split(worker or "")[0]
        if self.ended_in and self.ended_in not in self.regions:
            self.regions = (*self.regions, self.ended_in)

    @property
    def worker(self) -> str:
        """Who finished it, as this process calls it."""
        assert self.finished is not None
        return qualify(self.ended_in, self.finished.worker) if self.ended_in else self.finished.worker

    def strays(self, history: tuple[int, ...], prompt: tuple[int, ...]) -> list[Stray]:
        """What was computed for it beside a session's history."""
        return beside(history, prompt, (choice.ids for choice in self.choices)) if self.begun else []

    def continuations(self) -> tuple[Continuation, ...]:
        """Where each choice goes on; none where nothing has come yet."""
        if not any(choice.ids or choice.reason for choice in self.choices):
            return ()
        return tuple(
            Continuation(tuple(choice.ids), sum(map(len, choice.pieces)), choice.reason) for choice in self.choices
        )
