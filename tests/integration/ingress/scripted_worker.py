"""A worker in a hundred lines: speaks the wire, says what it was told to say, remembers what it was asked.

No model and no engine: it answers every request with `reply`, and counts as cached whatever prefix an earlier request's
tokens already had, as a worker with endless memory would. Of several choices each begins one token later in `reply`;
one that an earlier attempt began goes on after its tokens.
The log probability of a choice's token i is `-0.5 * (i + 1)`, and no alternative is possible at all; that of the
prompt's token i `-0.25 * i`, with rank i, and alternatives as probable.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import kvfleet.worker
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import (
    Accepted,
    AdminCommand,
    AdminReply,
    AdminRequest,
    Bundle,
    CancelRequest,
    ChoiceFinished,
    Failed,
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    Heartbeat,
    Inspection,
    Load,
    Progress,
    PromptScores,
    ResendRequest,
    ReturnExpected,
    Started,
    State,
    StopToken,
    TierLoad,
    TokenLogprobs,
    Tokens,
    WorkerRecord,
    WorkerRole,
)
from kvproto.subjects import WORKER_INBOX, Subjects, inbox_prefix
from kvproto.tasks import end

DEMO = Path(kvfleet.worker.__path__[0]) / "model" / "demo_model"
PART_BYTES = 20_000  # small, so that a bundle takes several parts
CONTEXT = 512
SCORES_AT_ONCE = 3
HELLO = ((550, "He"), (81, "l"), (951, "lo"), (6, "!"))  # the tokenizer would write H, ell, o, !
HELLO_IDS = tuple(token for token, _ in HELLO)


def demo_bundle(model: str = "demo", **changes: Any) -> Bundle:
    tokenizer_json = (DEMO / "tokenizer.json").read_text()
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    values: dict[str, Any] = {
        "model": model,
        "tokenizer_json": tokenizer_json,
        "chat_template": (DEMO / "chat_template.jinja").read_text(),
        "bos_token": config["bos_token"],
        "eos_token": config["eos_token"],
        "stop_ids": (2, 1),
        "context_length": CONTEXT,
        "vocab_size": Tokenizer.from_str(tokenizer_json).get_vocab_size(),
        "default_temperature": 0.8,
        "model_revision": "revision-1",
        **changes,
    }
    return Bundle(**values)


@dataclass
class ScriptedWorker:
    """Change its fields between requests; `requests` and `cancels` are what arrived."""

    id: str
    connection: Connection
    subjects: Subjects
    bundle: Bundle
    reply: list[tuple[int, str]] = field(default_factory=lambda: list(HELLO))
    token_s: float = 0.0
    failure: tuple[str, str, bool] | None = None  # code, message, retryable: instead of the first token
    fails_after: int | None = None  # tokens before it
    failed_field: str | None = None
    stop_string: str = ""  # that ends the reply
    stalls_at: int | None = None  # index of a token: before it, it clears `held`
    stop_token: StopToken | None = None  # that ends every choice
    stalls_in_prompt: int | None = None  # index of a prompt's token: after its score, it clears `held`
    held: asyncio.Event = field(default_factory=asyncio.Event)  # clear it to keep requests queued
    requests: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    cancels: list[CancelRequest] = field(default_factory=list)
    returns: list[ReturnExpected] = field(default_factory=list)
    generated: int = 0  # tokens, of all requests
    admin: list[AdminRequest] = field(default_factory=list)
    answers_admin: bool = True
    tiers: dict[str, TierLoad] = field(default_factory=dict)
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        url: str,
        subjects: Subjects,
        worker: str = "w1",
        bundle: Bundle | None = None,
        *,
        grammars: bool = True,
        scores: bool = True,
    ) -> ScriptedWorker:
        connection = await Connection.open(
            url, name=f"worker-{worker}", inbox_prefix=inbox_prefix(WORKER_INBOX, worker)
        )
        self = cls(worker, connection, subjects, bundle or demo_bundle())
        self.held.set()
        for subject, handler in (
            (subjects.worker_generate_all(worker), self._on_generate),
            (subjects.worker_cancel(worker), self._on_cancel),
            (subjects.worker_resend(worker), self._on_resend),
            (subjects.worker_admin(worker), self._on_admin),
            (subjects.worker_returns(worker), self._on_return_expected),
        ):
            await connection.subscribe(subject, handler)
        await connection.synced()
        bucket = await Bucket.open(connection, subjects.members_bucket)
        record = WorkerRecord(
            id=worker,
            epoch=new_epoch(),
            lease="",
            state=State.READY,
            model=self.bundle.model,
            address="tcp://127.0.0.1:1",
            host="testhost",
            pid=4242,
            grammars=grammars,
            scores=scores,
            pauses=True,
            engine="vllm",
            engine_pid=4243,
            role=WorkerRole.PREFILL,
            versions=codec.supported_versions(),
            bundle="hash-of-" + self.bundle.model,
            context_length=self.bundle.context_length,
            slots=8,
        )
        self._lease = Lease(bucket, record)
        await self._lease.register()
        self._tasks = [
            asyncio.create_task(self._lease.run(lambda error: None)),
            asyncio.create_task(self._beat(record)),
        ]
        return self

    async def stop(self) -> None:
        await end([*self._tasks, *self.running.values()])
        await self._lease.release()
        await self.connection.close()

    async def _beat(self, record: WorkerRecord) -> None:
        while True:
            running = len(self.running)
            load = Load(slots=8, running=running, prompt_tokens_total=100, hit_tokens_total=25, tiers=self.tiers)
            beat = Heartbeat(self.id, record.epoch, State.READY, load)
            await self.connection.publish(self.subjects.heartbeat(self.id), codec.encode(beat))
            await asyncio.sleep(0.5)

    # ------------------------------------------------------------------ requests

    async def _on_return_expected(self, message: Message) -> None:
        self.returns.append(codec.decode(ReturnExpected, message.data))

    async def _on_generate(self, message: Message) -> None:
        request = codec.decode(GenerateRequest, message.data)
        self.requests.append((message.subject.rsplit(".", 1)[-1], request))
        accepted = Accepted(request.request, request.attempt, self.id, self._lease.record.epoch)
        await self.connection.publish(message.reply, codec.encode_frames([accepted]))
        task = self.running[request.request] = asyncio.create_task(self._generate(request))
        task.add_done_callback(lambda _: self.running.pop(request.request, None))

    async def _generate(self, request: GenerateRequest) -> None:
        await self.held.wait()
        me = (request.request, request.attempt)
        prompt = request.prompt_ids

        async def send(*frames: Frame) -> None:
            await self.connection.publish(request.inbox, codec.encode_frames(frames))

        failure = Failed(*me, *self.failure, field=self.failed_field) if self.failure else None
        if failure and not self.fails_after:
            await send(failure)
            return
        cached = min(max((_common(prompt, known) for known in self.sequences), default=0), len(prompt) - 1)
        await send(Started(*me, self.id, len(prompt), {"device": cached}))
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            for first in range(max(request.scored, 1), len(prompt), SCORES_AT_ONCE):
                await self.held.wait()
                last = min(first + SCORES_AT_ONCE, len(prompt))
                scored = tuple(_prompt_scores(at, sampling.prompt_logprobs) for at in range(first, last))
                await send(PromptScores(*me, first, scored))
                if self.stalls_in_prompt is not None and last > self.stalls_in_prompt:
                    self.held.clear()
        replies = [self.reply[choice:][: sampling.max_tokens] for choice in range(sampling.n)]
        begins = [len(request.continuation(choice).output_ids) for choice in range(sampling.n)]
        for index in range(len(replies[0])):
            if failure and index == self.fails_after:
                await send(failure)
                return
            if index == self.stalls_at:
                self.held.clear()
            await self.held.wait()
            if self.token_s and index >= min(begins):
                await asyncio.sleep(self.token_s)
            said = [
                (choice, *reply[index]) for choice, reply in enumerate(replies) if begins[choice] <= index < len(reply)
            ]
            self.generated += len(said)
            scores = (_scores(index, sampling.logprobs),) if sampling.logprobs is not None else ()
            await send(*(Tokens(*me, choice, index, (token,), (text,), scores) for choice, token, text in said))
        self.sequences.append((*prompt, *(token for token, _ in replies[0])))
        reasons = [
            FinishReason.STOP if len(reply) >= len(self.reply) - choice else FinishReason.LENGTH
            for choice, reply in enumerate(replies)
        ]
        if sampling.n > 1:
            ends = enumerate(zip(reasons, replies, strict=True))
            stop = self.stop_string, self.stop_token
            await send(*(ChoiceFinished(*me, choice, reason, len(reply), *stop) for choice, (reason, reply) in ends))
        total = sum(map(len, replies))
        stop = self.stop_string, self.stop_token
        await send(Finished(*me, reasons[0], len(prompt), total, cached, self.id, *stop))

    async def _on_resend(self, message: Message) -> None:
        """It loses nothing: whoever asks only hears that it is there."""
        asked = codec.decode(ResendRequest, message.data)
        progress = Progress(asked.request, asked.attempt, 0)
        await self.connection.publish(asked.inbox, codec.encode_frames([progress]))

    async def _on_cancel(self, message: Message) -> None:
        cancel = codec.decode(CancelRequest, message.data)
        self.cancels.append(cancel)
        if (task := self.running.get(cancel.request)) is not None:
            task.cancel()

    async def _on_admin(self, message: Message) -> None:
        request = codec.decode(AdminRequest, message.data)
        self.admin.append(request)
        if not self.answers_admin:
            return
        if request.command is AdminCommand.BUNDLE:
            data = codec.encode(self.bundle)
        elif request.command is AdminCommand.INSPECT:
            known = max((_common(request.ids, one) for one in self.sequences), default=0)
            data = codec.encode(Inspection(known, tuple(range(known // 16)), {"device": known, "host": known + 16}))
        elif request.command is AdminCommand.ERASE:
            self.sequences = [one for one in self.sequences if one != request.ids]
            data = b""
        else:
            data = b"safetensors of layer %d of %d tokens" % (request.layer, len(request.ids))
        parts = [data[i : i + PART_BYTES] for i in range(0, max(1, len(data)), PART_BYTES)]
        reply = AdminReply(request.part, len(parts), parts[request.part])
        await self.connection.publish(message.reply, codec.encode(reply))


def _scores(index: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5 * (index + 1), tuple(range(6, 6 + top)), (float("-inf"),) * top)


def _prompt_scores(index: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.25 * index, tuple(range(6, 6 + top)), (-0.25 * index,) * top, index)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    same = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        same += 1
    return same
