"""Judges a silent stream, and whether to ask a placement that has not answered lately. Pure: time is passed in.

    tokens ──nothing for a few steps──▶ ask ──answered: it works on──▶ ask again, ever more rarely
                                         │
                                         └─nothing for 1 s, heartbeats late too──▶ gone
                                           (heartbeats come: 10 s)                  deaf

Heartbeats say how long a worker's steps take. One that answers that its present step takes far longer hangs. Times
during which this process stood still, or NATS was away, do not count.

    closed ──5 questions in a row unanswered──▶ open ──a quarter of a second──▶ one asks ──unanswered──▶ open
       ▲                                          │                                 │
       └──────────────────────────────────an answer in time─────────────────────────┘

While a `PlacementBreaker` is open, requests go by the ring without a wait of 50 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvproto.fleet_view import RECONNECT_GRACE_S

LEAST_S = 0.3
STEPS = 6
RARELY_S = 5.0  # between questions to a worker that goes on answering
ANSWER_S = 1.0
SERVER_S = 0.6  # after a question NATS must have been heard, else a missing answer proves nothing
BEAT_LATE_S = 1.2  # of a heartbeat every 0.5 s
DEAF_S = 10.0
HUNG_S, HUNG_STEPS = 3.0, 20
UNMEASURED_S = 30.0  # the first step of all may take long
SILENT_ENOUGH = 5  # questions to placement
ASK_AGAIN_S = 0.25
LATE_S = 0.25  # a timer that is so late proves that this process stood still


class Verdict(Enum):
    WAIT = "wait"
    ASK = "ask"
    GONE = "is gone: no answer and no heartbeat"
    DEAF = "answers nothing"
    HUNG = "hangs in a step"


class Ear:
    """The time since which this process hears messages. One per client; `tick` several times a second."""

    def __init__(self, now: float) -> None:
        self.since = self._ticked_at = now
        self.sure_from = now  # from then on all other processes hear again, too

    def tick(self, now: float, *, listens: bool = True) -> bool:
        """`listens`: NATS is connected. Returns the same."""
        if not listens:
            self.since, self.sure_from = now, now + RECONNECT_GRACE_S
        elif now - self._ticked_at > LATE_S:
            self.since = now
        self._ticked_at = now
        return listens


@dataclass(eq=False, slots=True)
class Hearing:
    """A stream's times: when its worker was heard and asked."""

    heard_at: float  # the last frame or answer
    asked_at: float  # the first question since then, if later
    probed_at: float  # the last question
    answers: int = 0  # since the last token
    tokens: int = -1  # that were here at the last answer
    step_age_s: float = 0.0  # in the last answer

    def asks(self, now: float) -> None:
        self.probed_at = now
        if self.asked_at <= self.heard_at:
            self.asked_at = now

    def answered(self, tokens: int, step_age_s: float) -> None:
        self.answers = self.answers + 1 if tokens == self.tokens else 1
        self.tokens, self.step_age_s = tokens, step_age_s


def judge(
    now: float, ear: Ear, hearing: Hearing, tokens: int, *, step_s: float, beat_at: float, server_at: float
) -> Verdict:
    """`tokens` are here. Steps take `step_s` (0: not measured); `beat_at`: the worker's last heartbeat, `server_at`:
    NATS's last message."""
    heard_at, asked_at = hearing.heard_at, hearing.asked_at
    step_age_s = hearing.step_age_s if hearing.tokens == tokens else 0.0  # a token came since: the step has ended
    if step_age_s > (max(HUNG_S, HUNG_STEPS * step_s) if step_s else UNMEASURED_S):
        return Verdict.HUNG
    beat_late = now - max(beat_at, ear.since) > BEAT_LATE_S
    unanswered = asked_at > heard_at
    if unanswered:
        asked_at = max(asked_at, ear.since, ear.sure_from)
        if beat_late and now - asked_at > ANSWER_S and server_at > asked_at + SERVER_S:
            return Verdict.GONE
        if now - asked_at > DEAF_S:
            return Verdict.DEAF
    least = LEAST_S if beat_late else max(LEAST_S, STEPS * step_s)
    if now - max(heard_at, ear.since) < least:
        return Verdict.WAIT
    eager = unanswered or beat_late or step_age_s > LEAST_S
    pause_s = least if eager else min(least * 2.0 ** min(hearing.answers, 16), max(least, RARELY_S))
    return Verdict.ASK if now - hearing.probed_at >= pause_s else Verdict.WAIT


@dataclass(eq=False, slots=True)
class PlacementBreaker:
    """One client's; `now` never goes back."""

    _unanswered: int = 0  # in a row
    ask_at: float | None = None  # when the next one may, while open

    def may_ask(self, now: float) -> bool:
        """While open, one request per ASK_AGAIN_S may ask."""
        if self.ask_at is not None:
            if now < self.ask_at:
                return False
            self.ask_at = now + ASK_AGAIN_S
        return True

    def answered(self) -> None:
        self._unanswered, self.ask_at = 0, None

    def unanswered(self, now: float) -> None:
        self._unanswered += 1
        if self._unanswered >= SILENT_ENOUGH and self.ask_at is None:
            self.ask_at = now + ASK_AGAIN_S
