"""Frames of running requests, and of finished ones for a while, so that lost ones can be sent again. Pure.

accepted ──▶ running (tokens collect) ──terminal──▶ finished ──30 s──▶ forgotten

An attempt has one terminal frame: of several choices each ends with `ChoiceFinished`, the last one is followed by
`Finished`, and one that fails ends the attempt. It runs for as long as it has a reader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvchat.message_builder import MessageBuilder
from kvfleet.worker.port.outputs import SequenceFailed, SequenceOutput, SequenceStarted
from kvfleet.worker.streams.milestones import MilestoneLog
from kvfleet.worker.streams.records import AttemptRecord, Leases, Reader, Terminal, tracks_of, weight_of
from kvproto.errors import Unavailable
from kvproto.messages import (
    ChoiceFinished,
    Finished,
    Frame,
    GenerateRequest,
    Moved,
    Passed,
    Progress,
    PromptScores,
    Started,
    Tokens,
)
from kvproto.subjects import is_inbox

KEEP_FINISHED_S = 30.0
KEEP_FINISHED_TOKENS = 4_000_000  # of all attempts, prompts too; an alternative's log probability counts as one
LEAST_TOKENS = 32  # what an empty record counts
MAX_READERS = 16  # of an attempt, and as many watchers
PAUSED_LIMIT_S = 90.0  # a client gives its reader up after 60
TOKENS_PER_RESEND = 2048
SCORED_PER_FRAME = 128  # with log probabilities of up to 128 alternatives each

Key = tuple[str, int]


@dataclass(eq=False)
class FrameBook:
    """Owned by the worker's event loop. One record and one terminal frame per attempt; it notes their milestones."""

    worker: str
    milestones: MilestoneLog
    recomputed_total: int = 0  # tokens of continued attempts
    leases: Leases = field(default_factory=Leases)
    _running: dict[Key, AttemptRecord] = field(default_factory=dict)
    _finished: OrderedDict[Key, AttemptRecord] = field(default_factory=OrderedDict)  # oldest first
    _kept: int = 0  # tokens of these

    @property
    def running(self) -> list[AttemptRecord]:
        return list(self._running.values())

    @property
    def pending_sequences(self) -> int:
        """Choices of running attempts that have not ended."""
        return sum(len(record.pending) for record in self._running.values())

    def pending_of(self, key: Key) -> int:
        record = self._running.get(key)
        return 0 if record is None else len(record.pending)

    def find(self, request: str, attempt: int) -> AttemptRecord | None:
        return self._running.get((request, attempt))

    def known(self, request: str, attempt: int) -> AttemptRecord | None:
        """A running attempt, or one that ended lately."""
        return self._running.get((request, attempt)) or self._finished.get((request, attempt))

    def open(
        self,
        request: GenerateRequest,
        reply: str,
        tenant: str,
        now: float,
        content: bytes = b"",
        builders: Sequence[MessageBuilder] = (),
    ) -> AttemptRecord:
        reader = Reader(request.inbox, request.encoding)
        self.leases.hold(reader)
        watchers = [reply] if request.watcher and is_inbox(reply) else []
        name, attempt = request.request, request.attempt
        record = AttemptRecord(
            name, attempt, [reader], watchers, *tracks_of(request, builders), tenant, request, content, accepted_at=now,
            first_scored=max(request.scored, 1),
        )  # fmt: skip
        self.milestones.note(record, Passed.ACCEPTED, now)
        self._running[record.key] = record
        return record

    def join(self, record: AttemptRecord, request: GenerateRequest, reply: str) -> list[Frame]:
        """One more reader of a known attempt. Returns the frames to send it, from the first token that it lacks.

        An inbox that reads already gets none: the request was delivered twice, or its acknowledgement was lost. Raises
        Unavailable if the attempt began after this reader's tokens, or has MAX_READERS.
        """
        here = [len(request.continuation(choice).output_ids) for choice in range(len(record.tracks))]
        lacks = request.sampling.prompt_logprobs is not None and record.first_scored > max(request.scored, 1)
        if lacks or any(track.first_index > count for track, count in zip(record.tracks, here, strict=True)):
            raise Unavailable("this attempt goes on after tokens that are elsewhere: its beginning is not here")
        if record.terminal is None:
            watches = request.watcher and is_inbox(reply) and reply not in record.watchers
            reads = not record.is_read_at(request.inbox)
            if len(record.readers) + reads > MAX_READERS or len(record.watchers) + bool(watches) > MAX_READERS:
                raise Unavailable(f"this attempt has {MAX_READERS} readers already")
            if watches:
                record.watchers.append(reply)
            if not reads:
                return []
            reader = Reader(request.inbox, request.encoding)
            record.readers.append(reader)
            self.leases.hold(reader)
        elif request.again and record.is_read_at(request.inbox):
            return []  # all of it was sent there
        return self.repeat(*record.key, 0, here, request.scored)[1:]

    def leave(self, record: AttemptRecord, inbox: str = "") -> bool:
        """A reader leaves a running attempt (all, without `inbox`). Returns whether it was the last: the attempt is to
        be cancelled then, and its end is sent to that reader."""
        leaving = [reader for reader in record.readers if reader.inbox == inbox]
        if not inbox or len(leaving) == len(record.readers):
            record.is_left = True
            return True
        for reader in leaving:
            record.readers.remove(reader)
            self.leases.release(reader)
        record.paused_by -= {inbox, ""}  # it may have paused all; a reader that still wants that asks again
        return False

    def pause(self, record: AttemptRecord, inbox: str, *, paused: bool) -> None:
        """Note what a reader wants (all, without `inbox`)."""
        if not paused:
            record.paused_by -= {inbox, ""} if inbox else record.paused_by
        elif not inbox or record.is_read_at(inbox):
            record.paused_by.add(inbox)

    def leave_ended(self, request: str, attempt: int | None, inbox: str, tenant: str | None) -> list[AttemptRecord]:
        """A reader leaves attempts that have ended (all, without `inbox`; of any attempt or tenant if None): it goes on
        elsewhere after a move, or did not see the end. Returns those that nobody has read to their end."""
        keys = [(request, attempt)] if attempt is not None else [key for key in self._finished if key[0] == request]
        unread = []
        for key in keys:
            record = self._finished.get(key)
            if record is None or not record.readers or not record.is_of(tenant):
                continue
            record.readers = [reader for reader in record.readers if inbox and reader.inbox != inbox]
            if not record.readers and not isinstance(record.terminal, Moved):
                unread.append(record)
        return unread

    def went_on(self, tenant: str, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The tokens of choices that ended lately and begin with `ids`, a prompt and a part of what was generated for
        it: who knows these alone had left before the end."""
        size, found = len(ids), []
        for record in self._finished.values():
            prompt = record.prompt_ids
            if record.tenant != tenant or not 0 < len(prompt) <= size or prompt[-1] != ids[len(prompt) - 1]:
                continue  # most are told apart by one token
            if prompt == ids[: len(prompt)]:
                found += [chain for chain in record.chains if len(chain) > size and chain[:size] == ids]
        return found

    def add(self, output: SequenceOutput, now: float) -> list[tuple[AttemptRecord, Frame]]:
        """The frames for one output of the engine; none once the attempt has ended or is offered."""
        record = self._running.get((output.request, output.attempt))
        if record is None or record.is_offered:
            return []
        if type(output) is Tokens:
            output = record.tracks[output.choice].take(output)
            if not record.has_spoken:
                record.has_spoken = True
                self.milestones.note(record, Passed.FIRST_TOKEN, now)
            return [(record, output)]
        if isinstance(output, PromptScores):
            known = len(record.scores)
            record.scores.extend(output.logprobs)
            return [(record, frame) for frame in _scores(record, known)]
        if isinstance(output, SequenceStarted):
            self.recomputed_total += output.recomputed_tokens
            if record.started is not None:
                return []  # another choice found what the first one left
            waited, again = output.queue_seconds, output.recomputed_tokens
            started = Started(*record.key, self.worker, output.prompt_tokens, output.cached_by_tier, waited, again)
            return [self._start(record, started, now, output.saved_s)]
        if isinstance(output, SequenceFailed):
            return [self.end(record, record.failed(output.error), now)]
        assert isinstance(output, ChoiceFinished)
        output = record.tracks[output.choice].end(output)
        record.pending.discard(output.choice)
        framed: list[tuple[AttemptRecord, Frame]] = [(record, output)] if len(record.tracks) > 1 else []
        return framed if record.pending else [*framed, self._finish(record, now)]

    def conclude(self, record: AttemptRecord, prompt_tokens: int, now: float) -> list[tuple[AttemptRecord, Frame]]:
        """End an attempt all of whose choices an earlier one had ended: nothing is generated."""
        started = self._start(record, Started(*record.key, self.worker, prompt_tokens, {}), now)
        return [started, self._finish(record, now)]

    def _finish(self, record: AttemptRecord, now: float) -> tuple[AttemptRecord, Frame]:
        started, ends = record.started, record.ends
        assert started is not None  # a choice starts before it ends
        reason, total = ends[0].reason, sum(end.output_tokens for end in ends)
        prompt, cached = started.prompt_tokens, started.cached_tokens
        end = ends[0]
        finished = Finished(
            *record.key, reason, prompt, total, cached, self.worker, end.stop, end.stop_token, end.message
        )
        return self.end(record, finished, now)

    def _start(
        self, record: AttemptRecord, started: Started, now: float, saved_s: float = 0.0
    ) -> tuple[AttemptRecord, Frame]:
        """The milestone is of when it left the queue: its first step's outputs come a prefill later."""
        record.started = started
        left_at = min(record.accepted_at + started.queue_s, now)
        said = started.prompt_tokens, dict(started.cached), 0, None, saved_s
        self.milestones.note(record, Passed.STARTED, left_at, *said)
        return record, started

    def end(self, record: AttemptRecord, terminal: Terminal, now: float) -> tuple[AttemptRecord, Frame]:
        """Close an attempt; its first terminal frame stands."""
        if record.terminal is not None:
            return record, record.terminal
        record.terminal, record.finished_at = terminal, now
        record.pending.clear()
        record.asked = None
        for reader in record.readers:
            self.leases.release(reader)
        for track in record.tracks:
            track.builder = None
        size = len(record.prompt_ids) + weight_of(record.scores)
        record.weight = LEAST_TOKENS + size + sum(track.weight for track in record.tracks)
        self._kept += record.weight
        self._finished[record.key] = self._running.pop(record.key)
        self.milestones.note(record, Passed.ENDED, now, 0, {}, terminal.output_tokens, record.code)
        if record.trace is not None:
            record.trace.end(record.started, record.output_tokens, terminal)
        while self._kept > KEEP_FINISHED_TOKENS and len(self._finished) > 1:
            self._forget()
        return record, terminal

    def repeat(
        self,
        request: str,
        attempt: int,
        from_index: int,
        from_indices: Sequence[int] = (),
        scored: int = 0,
        *,
        step_age_s: float = 0.0,
    ) -> list[Frame]:
        """Progress, and all frames from `from_index` on, or from a choice's entry in `from_indices`; of the prompt's
        scores those past the first `scored` tokens. Empty for an unknown attempt."""
        if (record := self.known(request, attempt)) is None:
            return []
        frames: list[Frame] = [Progress(request, attempt, record.output_tokens, step_age_s)]
        if record.started is not None:
            frames.append(record.started)
        frames += _scores(record, max(0, scored - record.first_scored))
        for choice, track in enumerate(record.tracks):
            skip = max(0, (from_indices[choice] if choice < len(from_indices) else from_index) - track.first_index)
            count = SCORED_PER_FRAME if track.logprobs else TOKENS_PER_RESEND
            for start in range(skip, len(track.ids), count):
                part = slice(start, start + count)
                ids, text, logprobs = tuple(track.ids[part]), tuple(track.text[part]), tuple(track.logprobs[part])
                deltas, index = tuple(track.deltas[part]), track.first_index + start
                frames.append(Tokens(request, attempt, choice, index, ids, text, logprobs, deltas))
            if track.ended is not None and len(record.tracks) > 1:
                frames.append(track.ended)
        if record.terminal is not None:
            frames.append(record.terminal)
        return frames

    def overdue(self, now: float) -> list[AttemptRecord]:
        """Running attempts past their deadline or paused beyond PAUSED_LIMIT_S."""
        return [
            record
            for record in self._running.values()
            if now > record.deadline or (record.paused_at is not None and now - record.paused_at > PAUSED_LIMIT_S)
        ]

    def sweep(self, now: float) -> None:
        while self._finished and now - next(iter(self._finished.values())).finished_at >= KEEP_FINISHED_S:
            self._forget()

    def _forget(self) -> None:
        _, record = self._finished.popitem(last=False)
        self._kept -= record.weight


def _scores(record: AttemptRecord, skip: int) -> list[Frame]:
    """All but the first `skip`, in frames that no message is too small for."""
    return [
        PromptScores(*record.key, record.first_scored + at, tuple(record.scores[at : at + SCORED_PER_FRAME]))
        for at in range(skip, len(record.scores), SCORED_PER_FRAME)
    ]
