"""Judges a run by its history alone: what was promised and not kept. Pure.

What nobody promises is not judged but counted (`Verdict.exempt`): a bare producer cannot ask for frames that NATS lost,
and whoever watched its worker may have died with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.history import Answer, Exchange, Happened, History, Piece
from tests.chaos.schedule import Kind

TOLD_WITHIN_S = 4.0  # a bare producer of its worker's loss
HUNG_S = 31.0  # in which a vLLM server that does not answer may come back
SLACK_S = 1.0  # for a busy machine
LOGPROB_TOLERANCE = 1e-3

_HUNG = (Kind.VLLM_STOP, Kind.VLLM_HANG)
_VLLM_LOST = (Kind.VLLM_ENGINE_KILL, Kind.VLLM_SERVER_KILL, Kind.VLLM_WORKER_KILL, Kind.VLLM_HOST_KILL, *_HUNG)
_WORKER_LOST = (Kind.KILL, Kind.STOP_SHORT, Kind.STOP_LONG, Kind.PARTITION, Kind.CUT, *_VLLM_LOST)
_WATCH_LOST = (Kind.KILL, Kind.STOP_SHORT, Kind.STOP_LONG, Kind.PARTITION, Kind.CUT)
_LATE_S = 12.0  # so long after a fault its end may still be what somebody sees


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept; `what` is the word it is counted under."""

    what: str  # lost, duplicated, wrong, error, leak, crossed, process
    told: str
    exchange: int | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where an answer first differs from the right one: whether it was a near tie is for the model to say."""

    exchange: int
    case: str
    turn: int
    choice: int
    index: int
    expected: tuple[int, ...]  # all ids of the choice
    got: tuple[int, ...]


@dataclass(slots=True)
class Verdict:
    """`counts`: requests, finished, left, failed_as_promised, tokens, resumed, refused, exempt."""

    violations: list[Violation] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def found(self, what: str, told: str, exchange: int | None = None) -> None:
        self.violations.append(Violation(what, told, exchange))

    def count_of(self, what: str) -> int:
        return sum(one.what == what for one in self.violations)


def check(history: History) -> Verdict:
    """All of it."""
    verdict = Verdict()
    for exchange in history.exchanges:
        _check_exchange(exchange, history, verdict)
    for end in history.ends:
        if not end.asked:
            verdict.found("process", f"{end.name} ended by itself with code {end.code}:\n{end.said}")
        elif end.asked == "drain" and end.code != 0:
            verdict.found("process", f"{end.name} drained and ended with code {end.code} after {end.took_s:.1f} s")
    for told in history.unwell:
        verdict.found("process", told)
    for leak in history.leaks:
        verdict.found("leak", f"{leak.where}: {leak.what}")
    for crossed in history.crossed:
        verdict.found("crossed", crossed)
    return verdict


def _check_exchange(exchange: Exchange, history: History, verdict: Verdict) -> None:
    counts, number = verdict.counts, exchange.number
    counts["requests"] += 1
    counts["refused"] += len(exchange.refusals)
    counts["resumed"] += exchange.resumed
    if exchange.after_end:
        verdict.found("duplicated", f"{exchange.after_end} events after the last one: {exchange.late}", number)
    if len(exchange.ends) > 1:
        verdict.found("duplicated", f"{len(exchange.ends)} ends: {exchange.ends}", number)
        return
    answer = history.answers.get((exchange.case, exchange.turn))
    if exchange.left_at is not None:
        counts["left"] += 1
        if answer is not None:
            _check_beginning(exchange, answer, verdict)
        return
    if not exchange.ends:
        _check_without_end(exchange, history.faults, verdict)
        return
    end = exchange.ends[0]
    if end.code != "finished":
        _check_error(exchange, history.faults, verdict)
        return
    counts["finished"] += 1
    if not _check_order(exchange, history.faults, verdict):
        return
    if answer is not None:
        _check_answer(exchange, answer, verdict)
    counts["tokens"] += end.output_tokens or sum(len(piece.ids) for piece in exchange.pieces)


# ---------------------------------------------------------------------------------------------- ends


def _check_without_end(exchange: Exchange, faults: list[Happened], verdict: Verdict) -> None:
    if exchange.transport.is_bare and _any(faults, exchange, targets=("nats",)):
        verdict.counts["exempt"] += 1
        return
    if exchange.transport.is_bare and _unwatched(exchange, faults):
        verdict.counts["exempt"] += 1
        return
    if exchange.accepted_at is None:
        told = f"never taken on: {exchange.refusals[-3:]}"
    elif exchange.broken:
        told = f"its connection broke at {exchange.broken} and it could not go on elsewhere"
    else:
        told = "accepted, and never ended"
    verdict.found("lost", told, exchange.number)


def _check_error(exchange: Exchange, faults: list[Happened], verdict: Verdict) -> None:
    """An error is right in one case alone: a bare producer whose worker was lost, and that was told in time."""
    end = exchange.ends[0]
    if not exchange.transport.is_bare or not end.retryable:
        verdict.found("error", f"{end.code}: {end.message}", exchange.number)
        return
    if _any(faults, exchange, targets=("nats",)):
        verdict.counts["exempt"] += 1
        return
    worker = exchange.worker_at(end.at)
    during = [one for one in _during(faults, exchange) if one.fault.kind in _WORKER_LOST]
    lost = [one for one in during if worker in (None, one.fault.target)]  # it may not have begun before it failed
    if not lost:
        verdict.found("error", f"{end.code} though nothing happened to {worker}: {end.message}", exchange.number)
        return
    late = end.at - max(lost[-1].began, exchange.began)
    limit_s = TOLD_WITHIN_S + (HUNG_S if lost[-1].fault.kind in _HUNG else 0.0)
    if late > limit_s + SLACK_S and not _unwatched(exchange, faults):
        verdict.found("error", f"told of the loss of {worker} after {late:.1f} s", exchange.number)
        return
    verdict.counts["failed_as_promised"] += 1


def _unwatched(exchange: Exchange, faults: list[Happened]) -> bool:
    """Its worker was lost, and so may have been the placement that watched it."""
    during = _during(faults, exchange)
    worker_lost = any(one.fault.target.startswith(("r", "f")) and one.fault.kind in _WORKER_LOST for one in during)
    return worker_lost and any(one.fault.target.startswith("p") and one.fault.kind in _WATCH_LOST for one in during)


def _during(faults: Iterable[Happened], exchange: Exchange) -> list[Happened]:
    """Faults that may have had to do with an exchange."""
    return [one for one in faults if one.began <= exchange.until and one.until + _LATE_S >= exchange.began]


def _any(faults: Iterable[Happened], exchange: Exchange, *, targets: tuple[str, ...]) -> bool:
    return any(one.fault.target in targets for one in _during(faults, exchange))


# ---------------------------------------------------------------------------------------------- tokens


def _check_order(exchange: Exchange, faults: list[Happened], verdict: Verdict) -> bool:
    """Indexes without a gap or repeat, where the transport says them."""
    for choice in {piece.choice for piece in exchange.pieces}:
        pieces = [piece for piece in exchange.pieces if piece.choice == choice and piece.index is not None]
        for before, after in pairwise((Piece(0.0, choice, "", (), 0), *pieces)):
            expected = (before.index or 0) + len(before.ids)
            if after.index == expected:
                continue
            if exchange.transport.is_bare and _any(faults, exchange, targets=("nats",)):
                verdict.counts["exempt"] += 1
                return False
            what = "lost" if (after.index or 0) > expected else "duplicated"
            told = f"choice {choice}: token {after.index} came after token {expected - 1}"
            verdict.found(what, told, exchange.number)
            return False
    return True


def _check_answer(exchange: Exchange, answer: Answer, verdict: Verdict) -> None:
    number = exchange.number
    for choice, text in enumerate(answer.texts):
        ids, right = exchange.ids_of(choice), answer.ids[choice]
        if right and ids != right:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), min(len(ids), len(right))
            )
            verdict.mismatches.append(Mismatch(number, exchange.case, exchange.turn, choice, at, right, ids))
            verdict.found(
                "wrong", f"choice {choice} differs from token {at} on: {ids[at:][:5]} for {right[at:][:5]}", number
            )
            return
        if exchange.text_of(choice) != text:
            told = f"choice {choice}: text differs: {_apart(exchange.text_of(choice), text)}"
            verdict.found("wrong", told, number)
            return
        if exchange.reasons.get(choice) != answer.reasons[choice]:
            told = f"choice {choice} ended by {exchange.reasons.get(choice)}, not {answer.reasons[choice]}"
            verdict.found("wrong", told, number)
        _check_logprobs(exchange, choice, answer.logprobs[choice] if answer.logprobs else (), verdict)
    said = exchange.ends[0].output_tokens
    if answer.output_tokens is not None and said is not None and said != answer.output_tokens:
        verdict.found("wrong", f"counts {said} tokens, there are {answer.output_tokens}", number)


def _check_logprobs(exchange: Exchange, choice: int, right: tuple[float, ...], verdict: Verdict) -> None:
    values = exchange.logprobs.get(choice, [])
    if len(values) != len(right):
        told = f"choice {choice}: {len(values)} log probabilities of {len(right)}"
        verdict.found("wrong", told, exchange.number)
        return
    worst = max((abs(a - b) for a, b in zip(values, right, strict=True) if math.isfinite(a - b)), default=0.0)
    if worst > LOGPROB_TOLERANCE:
        verdict.found("wrong", f"choice {choice}: a log probability is off by {worst:.2g}", exchange.number)


def _check_beginning(exchange: Exchange, answer: Answer, verdict: Verdict) -> None:
    """Of a client that left: what it had was right."""
    for choice, text in enumerate(answer.texts):
        if not text.startswith(exchange.text_of(choice)):
            told = f"choice {choice}, as far as it was read: {_apart(exchange.text_of(choice), text)}"
            verdict.found("wrong", told, exchange.number)


def _apart(got: str, right: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return f"at character {at} of {len(right)} ({len(got)} came): {got[at : at + 30]!r} for {right[at : at + 30]!r}"
