"""One choice of one attempt as vLLM sees it: what it is asked for, and what comes of its tokens.

    waiting ──asked──▶ in vLLM's queue ──scheduled──▶ running ──▶ ended
       ▲ └──────────────pause, a full sliding context─────┘
       └─ the first choice of a fresh attempt computes the prompt, the others wait for its first token

vLLM is asked for plain tokens up to a number or a stop id. Text, stop strings and the sliding context are ours, and so
is the draw, so that a sequence goes on anywhere as it would have here. A request of its own scores a prompt, first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvfleet.worker.port.outputs import SequenceStarted
from kvfleet.worker.port.sequence_spec import Key, SequenceSpec
from kvfleet.worker.port.tenant_costs import TenantAccount
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.text_stream import NOTHING, Released, TextStream
from kvfleet.worker.vllm.foreign_blocks import salt_of_root
from kvfleet_vllm import wire
from kvproto.block_hash import own_root
from kvproto.codec import floored
from kvproto.messages import FinishReason, Sampling, StopToken, Tier, TokenLogprobs

_DRAWING = {  # what of it a draw depends on
    one.name: one.default
    for one in fields(Sampling)
    if one.name in ("temperature", "top_p", "top_k", "seed", "min_p", "min_tokens") or one.name.endswith("_penalty")
}


class Sockets(NamedTuple):
    """Paths of the worker's Unix sockets: for the connector's news, and for the sampler's failures."""

    news: str
    failures: str

    @property
    def tokenizer(self) -> str:
        """A file, which the sampler reads for grammars."""
        return f"{self.news}.tokenizer"

    def tell_tokenizer(self, said: Callable[[], str]) -> None:
        """From any thread."""
        if not (path := Path(self.tokenizer)).exists():
            made = path.with_suffix(f".{threading.get_ident()}")
            made.write_text(said())
            made.replace(path)

    def close(self) -> None:
        Path(self.tokenizer).unlink(missing_ok=True)


@dataclass(eq=False, slots=True)
class VllmSequence:
    spec: SequenceSpec
    _: KW_ONLY
    window: ContextWindow
    stop_ids: frozenset[int]
    text: TextStream
    siblings: list[VllmSequence]
    arrival: int
    enqueued: float
    account: TenantAccount
    root: bytes = field(init=False)
    outputs: list[int] = field(init=False)
    num_prompt: int = field(init=False)  # of its tokens vLLM sees at first, whatever a sliding context drops later
    scored: int = field(init=False)  # leading tokens of the prompt that need no scores any more
    name: str = ""  # under which vLLM has it
    restored: dict[Tier, int] = field(default_factory=dict)  # tokens that came from below
    cached_tokens: int = 0  # of what it begins with; until it is scheduled, by what vLLM has told of its blocks
    is_drawn: bool = False  # by our sampler, as far as vLLM was asked now
    is_running: bool = False
    is_paused: bool = False
    started: bool = False  # its reader knows
    stop_token: StopToken | None = None  # that ended it
    scheduled: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # it has a token, or ended without one
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.root = own_root(self.spec.root)
        self.outputs = list(self.spec.output_ids)
        self.num_prompt = len(self.spec.prompt_ids) - self.window.start(len(self.spec.prompt_ids))
        self.scored = self.num_prompt if self.spec.scored is None else min(max(self.spec.scored, 1), self.num_prompt)

    @property
    def key(self) -> Key:
        return self.spec.request, self.spec.attempt, self.spec.choice

    @property
    def is_fresh(self) -> bool:
        return not (self.is_running or self.is_paused or self.started or self.spec.output_ids)

    @property
    def is_scored(self) -> bool:
        """Nothing of its prompt is to be scored any more."""
        return self.scored >= self.num_prompt

    @property
    def start(self) -> int:
        """How many of its tokens are out of the context."""
        return self.window.start(len(self.spec.prompt_ids) + len(self.outputs))

    @property
    def length(self) -> int:
        return len(self.spec.prompt_ids) + len(self.outputs) - self.start

    @property
    def queued_tokens(self) -> int:
        """Tokens that vLLM has to compute before the next one."""
        return 0 if self.begun.is_set() and self.is_running else max(self.length - self.cached_tokens, 1)

    @property
    def ids(self) -> list[int]:
        """What vLLM sees."""
        return [*self.spec.prompt_ids, *self.outputs][self.start :]

    @property
    def end(self) -> FinishReason | None:
        """Why it ends now, stop ids aside."""
        if self.text.stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.outputs) >= self.window.max_tokens and self.is_scored else None

    def start_after(self, waited: float) -> SequenceStarted:
        request, attempt, choice = self.key
        cached = min(self.cached_tokens, self.length)
        again = self.length - cached if self.spec.output_ids else 0
        return SequenceStarted(request, attempt, self.num_prompt, cached, waited, choice, self.restored, again)

    def take(self, token: int, logprobs: TokenLogprobs | None) -> tuple[Released, FinishReason | None]:
        """What may be told of the next token, and why the sequence ends with it, if so."""
        stopped = token in self.stop_ids
        released = NOTHING
        if stopped and logprobs is not None:
            self.stop_token = StopToken(token, floored(logprobs))
        if not stopped:
            self.outputs.append(token)
            self.account.generated_tokens += 1
            released = self.text.push(token, logprobs)
        reason = FinishReason.STOP if stopped else self.end
        if reason is not None:
            released = released.then(self.text.finish())
            reason = FinishReason.STOP if self.text.stop else reason
        return released, reason

    def body(self, model: str, sockets: Sockets, store: Mapping[str, Any]) -> dict[str, Any]:
        """Of a request to vLLM's token route. `store`: what its connector is to read and save."""
        asked, most = self.spec.sampling, self.window.max_tokens - len(self.outputs)
        if self.window.limit is not None:
            most = min(most, self.window.limit - self.length)
        params: dict[str, Any] = {
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stop_token_ids": sorted(self.stop_ids),
        }
        if asked.logprobs is not None:
            params["logprobs"] = asked.logprobs + 1  # vLLM counts the drawn token among them
        self.is_drawn = self._wants_draw()
        if self.is_drawn:
            params["extra_args"] = {wire.KEY: self._draw(sockets)}
        return self._request(model, sockets, store) | {"stream": True, "sampling_params": params}

    def scoring_body(self, model: str, sockets: Sockets) -> dict[str, Any]:
        """Of a request for the prompt's scores. vLLM reuses nothing for it, and keeps what it computes."""
        params = {"max_tokens": 1, "temperature": 0, "detokenize": False}
        params["prompt_logprobs"] = self.spec.sampling.prompt_logprobs or 0
        self.is_drawn = False
        return self._request(model, sockets, {}) | {"stream": False, "sampling_params": params}

    def _request(self, model: str, sockets: Sockets, store: Mapping[str, Any]) -> dict[str, Any]:
        spec = self.spec
        return {
            "request_id": self.name,
            "model": spec.adapter or model,
            "token_ids": self.ids,
            "cache_salt": salt_of_root(self.root),
            "priority": -spec.priority,  # vLLM serves the least first
            "kv_transfer_params": {wire.KEY: {"version": wire.VERSION, "socket": sockets.news, **store}},
        }

    def _wants_draw(self) -> bool:
        """Whether it takes more than the most probable token."""
        asked = self.spec.sampling
        penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty != 1)
        may_not_stop = self.stop_ids and len(self.outputs) < asked.min_tokens
        return any((asked.grammar, asked.temperature, *penalties, asked.logit_bias, may_not_stop))

    def _draw(self, sockets: Sockets) -> Mapping[str, Any]:
        asked, prompt = self.spec.sampling, len(self.spec.prompt_ids)
        changed = {name: getattr(asked, name) for name, usual in _DRAWING.items() if getattr(asked, name) != usual}
        bias = {str(token): value for token, value in asked.logit_bias.items()}
        before = self.start - (prompt - self.num_prompt)  # tokens that a sliding context dropped
        return {
            "version": wire.VERSION,
            "request": self.name,
            "choice": self.spec.choice,
            "prompt": self.num_prompt,
            "dropped": [*self.spec.prompt_ids[prompt - self.num_prompt :], *self.outputs][:before],
            "stop_ids": sorted(self.stop_ids),
            "sampling": {"max_tokens": asked.max_tokens, "logit_bias": bias} | changed,
            "failures": sockets.failures,
            "grammar": self._grammar(sockets),
        }

    def _grammar(self, sockets: Sockets) -> Mapping[str, Any] | None:
        if (grammar := self.spec.sampling.grammar) is None:
            return None
        return {"form": grammar.form.value, "text": grammar.text, "said": grammar.said, "tokenizer": sockets.tokenizer}
