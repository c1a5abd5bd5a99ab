"""Draws for rows of vLLM's batch, by the rules of kvfleet's own engine. Knows nothing of vLLM.

    extra_args["kvfleet"] ──▶ SampledRow ──▶ one Draw a step ──▶ the drawn token has the one largest logit

A worker puts what a sequence asks for into `extra_args`, and leaves greedy decoding to vLLM, which picks that token.
A draw depends on (seed, choice, index) and the logits alone, and penalties on prompt and outputs, so a sequence that
goes on elsewhere, with its outputs in the prompt, draws what it would have drawn here.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from kvfleet_vllm.wire import KEY, VERSION
from kvproto.errors import KvfleetError
from kvproto.messages import Grammar, GrammarForm, Sampling
from kvsampling.draw import Draw
from kvsampling.grammar import Grammars, Matcher
from kvsampling.sampler import sample

log = logging.getLogger(__name__)

_ASKED = frozenset(("version", "request", "choice", "prompt", "dropped", "stop_ids", "sampling", "failures", "grammar"))
_SAMPLING = frozenset(field.name for field in fields(Sampling))
TELL_S = 0.5  # a worker that does not read must not hold up vLLM's step for longer
_GRAMMARS: dict[str, Grammars] = {}  # by the file that says of what tokenizer
CHOSEN = torch.finfo(torch.float32).max


@dataclass(eq=False, slots=True)
class SampledRow:
    """`before` outputs of earlier attempts end vLLM's prompt. `outputs` is vLLM's own list, which grows. `failures` is
    a datagram socket's path, at which the worker hears of rows that cannot be drawn."""

    request: str
    choice: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    prompt: Sequence[int]
    before: Sequence[int]
    outputs: Sequence[int]
    failures: str
    matcher: Matcher | None = None

    @classmethod
    def of(cls, asked: Mapping[str, Any], ids: Sequence[int], outputs: Sequence[int]) -> SampledRow:
        """`ids` are vLLM's prompt, which a sliding context has `dropped` some tokens of."""
        prompt = asked["prompt"]
        if asked["dropped"]:
            ids = [*asked["dropped"], *ids]
        return cls(
            asked["request"],
            asked["choice"],
            sampling_of(asked),
            tuple(asked["stop_ids"]),
            ids[:prompt],
            ids[prompt:],
            outputs,
            asked["failures"],
            matcher_of(asked["grammar"]),
        )

    def prepare(self) -> None:
        """Begin what `draw` needs, beside the forward pass."""
        if self.matcher is not None and min(self.outputs[-1:], default=0) >= 0:  # else vLLM does not know them yet
            self.matcher.prepare([*self.before, *self.outputs])

    def draw(self) -> Draw:
        wants, index = self.sampling, len(self.before) + len(self.outputs)
        banned = self.stop_ids if index < wants.min_tokens else ()
        penalised = wants.presence_penalty or wants.frequency_penalty or wants.repetition_penalty != 1
        prompt = self.prompt if penalised else ()
        outputs = [*self.before, *self.outputs] if penalised or self.matcher is not None else ()
        return Draw(wants, self.choice, index, prompt, outputs, banned, self.matcher)


def matcher_of(said: Mapping[str, Any] | None) -> Matcher | None:
    """Of the worker's `grammar`. It tried it before, so that this is quick."""
    if said is None:
        return None
    if (grammars := _GRAMMARS.get(said["tokenizer"])) is None:
        grammars = _GRAMMARS[said["tokenizer"]] = Grammars.of_json(Path(said["tokenizer"]).read_text())
    return Matcher(grammars, Grammar(GrammarForm(said["form"]), said["text"], said["said"]))


def sampling_of(asked: Mapping[str, Any]) -> Sampling:
    """Raises ValueError for anything but what a worker of this version sends."""
    if asked.get("version") != VERSION:
        raise ValueError(f"the worker speaks version {asked.get('version')} of {KEY}'s sampling, this is {VERSION}")
    if set(asked) != _ASKED or not set(asked["sampling"]) <= _SAMPLING:
        strange = sorted(chain(set(asked) ^ _ASKED, set(asked["sampling"]) - _SAMPLING))
        raise ValueError(f"{KEY}: not understood or missing: {', '.join(strange)}")
    bias = {
        int(token): value for token, value in asked["sampling"].get("logit_bias", {}).items()
    }  # JSON's keys are text
    return Sampling(**{**asked["sampling"], "logit_bias": bias})


def choose(logits: Tensor, rows: Mapping[int, SampledRow]) -> None:
    """Change `logits` `[batch, vocab]` float32 in place: each of `rows` has its drawn token's the largest.

    A row that cannot be drawn is left as it is, and the worker has heard so before vLLM can tell its token.
    """
    live = sorted(row for row in rows if row < len(logits))
    if not live:
        return
    whole = len(live) == live[-1] - live[0] + 1
    part = logits[live[0] : live[-1] + 1] if whole else logits[torch.tensor(live, device=logits.device)]
    draws = [rows[row].draw() for row in live]
    tokens: list[int] = []
    drawn: list[int] = []
    for row, draw, token in zip(live, draws, sample(part, draws), strict=True):
        if isinstance(token, int):
            drawn.append(row)
            tokens.append(token)
        elif isinstance(token, KvfleetError):
            _tell(rows[row], draw.index, token)
    at = torch.tensor([drawn, tokens], dtype=torch.int64, device=logits.device)
    logits[at[0], at[1]] = CHOSEN


def _tell(row: SampledRow, index: int, error: KvfleetError) -> None:
    message = msgpack.packb([row.request, row.choice, index, error.code, str(error)])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(TELL_S)
            sender.sendto(message, row.failures)
    except OSError as gone:  # the worker is gone, and with it who would read the token
        log.warning("request %s: %s; its worker does not hear of it: %s", row.request, error, gone)
