"""What a vLLM server is, as its connector tells it, and what of that a worker cannot live with. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvfleet_vllm.wire import EngineHello, WorkerHello
from kvproto.block_hash import HASH_BYTES
from kvproto.errors import UnsupportedModel

OLDEST, NEWEST = (0, 31), (0, 32)  # releases that were tried
LOGPROBS = 129  # 128 alternatives and the drawn token
SAMPLER = "kvfleet_vllm.sampler:Sampler"
SAMPLERS = {SAMPLER, "kvfleet_vllm.slot_sampler:SlotSampler"}  # of vLLM's first and second model runner
_NEEDED = ("model", "max_model_len", "vocab_size", "block_size", "num_gpu_blocks", "max_num_seqs", "dtype", "kv_events")


class Unsuitable(UnsupportedModel):
    """This server can never be the engine of this worker; says why in one line."""


@dataclass(frozen=True, slots=True)
class MovedFormat:
    """`nbytes` of a block, of all `ranks`; blocks of equal `name`, 16 bytes, mean the same."""

    name: bytes
    nbytes: int
    ranks: int

    @classmethod
    def of(cls, workers: Sequence[WorkerHello]) -> MovedFormat | None:
        """None unless all workers can move blocks of one size."""
        if not workers or not all(one.format for one in workers) or len({one.block_bytes for one in workers}) > 1:
            return None
        digest = hashlib.blake2b(b"".join(one.format for one in workers), digest_size=HASH_BYTES)
        return cls(digest.digest(), sum(one.block_bytes for one in workers), len(workers))


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """`block_size` in tokens, `block_bytes` of one such block on one rank. `events`: as vLLM's flag has them."""

    version: str
    name: str
    model: str  # a folder or a hub id
    context_length: int
    vocab_size: int
    block_size: int
    blocks: int
    block_bytes: int
    slots: int
    dtype: str
    cache_dtype: str
    has_lora: bool
    moved: MovedFormat | None  # None: its blocks cannot be read or written from outside
    groups: tuple[str, ...]  # kinds of its cache groups
    events: Mapping[str, Any]

    @classmethod
    def of(cls, hello: EngineHello, name: str, workers: Sequence[WorkerHello]) -> ServerFacts:
        """`name`: what clients of vLLM call the model. Raises Unsuitable if a fact is missing."""
        told = hello.facts
        if untold := [name for name in _NEEDED if told.get(name) is None]:
            raise Unsuitable(f"the connector in vLLM {hello.vllm} does not tell {', '.join(untold)}")
        try:
            return cls(
                version=hello.vllm,
                name=name,
                model=str(told["model"]),
                context_length=int(told["max_model_len"]),
                vocab_size=int(told["vocab_size"]),
                block_size=int(told["block_size"]),
                blocks=int(told["num_gpu_blocks"]),
                block_bytes=int(told["bytes_per_block"] or 0),
                slots=int(told["max_num_seqs"]),
                dtype=str(told["dtype"]),
                cache_dtype=str(told["cache_dtype"]),
                has_lora=bool(told["enable_lora"]),
                moved=MovedFormat.of(workers),
                groups=tuple(str(one["kind"]) for one in told.get("kv_cache_groups") or ()),
                events=dict(told["kv_events"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Unsuitable(f"the connector in vLLM {hello.vllm} tells nonsense: {error}") from None

    @property
    def has_states(self) -> bool:
        return "mamba" in self.groups  # as vLLM calls recurrent layers of all kinds

    @property
    def state_slots(self) -> int:
        """That one state takes: each has room for a block of every other group."""
        states = self.groups.count("mamba")
        return -(-states // (len(self.groups) - states))

    def changes(self, before: ServerFacts) -> list[str]:
        """Why a worker cannot go on with it after a restart."""
        names = (
            "name", "model", "context_length", "vocab_size", "block_size", "dtype", "cache_dtype", "events", "moved",
        )  # fmt: skip
        pairs = [(name, getattr(self, name), getattr(before, name)) for name in names]
        return [f"{name} {is_now!r}, it was {was!r}" for name, is_now, was in pairs if is_now != was]


def is_known(version: str) -> bool:
    parts = version.split(".")
    return (
        len(parts) > 1
        and all(one.isdecimal() for one in parts[:2])
        and (OLDEST <= (int(parts[0]), int(parts[1])) <= NEWEST)
    )


def missing_flags(told: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` that a worker needs and this server was started without."""
    events: Mapping[str, Any] = told.get("kv_events") or {}
    needs = {
        "--scheduling-policy priority": told.get("scheduling_policy") == "priority",
        "--enable-prefix-caching": told.get("enable_prefix_caching") is not False,
        "--no-async-scheduling": not told.get("async_scheduling"),
        f"--max-logprobs {LOGPROBS}": not 0 <= (told.get("max_logprobs") or 0) < LOGPROBS,
        f"--logits-processors {SAMPLER}": any(str(one) in SAMPLERS for one in told.get("logits_processors") or ()),
        "--kv-events-config with enable_kv_cache_events, publisher zmq, a replay_endpoint and a topic": bool(
            events.get("enabled")
            and events.get("publisher") == "zmq"
            and events.get("endpoint")
            and events.get("replay_endpoint")
            and events.get("topic")
        ),
    }
    return [flag for flag, is_there in needs.items() if not is_there]


def contradictions(
    facts: ServerFacts, told: Mapping[str, Any], *, block_size: int, name: str | None, dtype: str
) -> list[str]:
    """What the worker's settings say otherwise. `block_size` is ours; `dtype` may be auto."""
    found = []
    if facts.block_size % block_size:
        found.append(f"block_size: vLLM's blocks of {facts.block_size} tokens are not made of {block_size}")
    if name is not None and name != facts.name:
        found.append(f"served_model_name: vLLM serves {facts.name!r}, not {name!r}")
    if dtype not in ("auto", facts.dtype):
        found.append(f"dtype: vLLM computes in {facts.dtype}, not {dtype}")
    if (ranks := told.get("data_parallel_size") or 1) > 1:
        found.append(f"vLLM runs {ranks} data-parallel ranks: start one server, and one worker, for each")
    return found


@dataclass(frozen=True, slots=True)
class EventAddresses:
    """Where vLLM's KV events come from, as seen from the worker. `binds`: the worker's end binds."""

    endpoint: str
    replay: str
    topic: str
    binds: bool

    @classmethod
    def of(cls, events: Mapping[str, Any], url: str) -> EventAddresses:
        """vLLM connects to an endpoint that names a host, and binds one that does not, and every replay endpoint."""
        host = urlsplit(url).hostname or "127.0.0.1"
        endpoint = str(events["endpoint"])
        binds = endpoint.startswith("tcp://") and not _is_open(endpoint)
        return cls(_at(endpoint, host), _at(str(events["replay_endpoint"]), host), str(events["topic"]), binds)


def _is_open(endpoint: str) -> bool:
    return any(part in endpoint for part in ("*", "0.0.0.0", "[::]"))


def _at(endpoint: str, host: str) -> str:
    """An endpoint on all interfaces, as a client reaches it."""
    if not endpoint.startswith("tcp://") or not _is_open(endpoint):
        return endpoint
    return f"tcp://{host}:{endpoint.rsplit(':', 1)[1]}"
