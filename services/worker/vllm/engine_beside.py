"""Wiring of the engine beside a vLLM server."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.engine_port import EngineFacts
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.vllm.live_vllm_sequences import LiveVllmSequences, VllmModel
from kvfleet.worker.vllm.no_tiers import NoTiers, StoreTiers
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.server_facts import ServerFacts
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.vllm_engine import VllmEngine
from kvfleet.worker.vllm.vllm_server import VllmServer


def engine_beside(
    server: VllmServer,
    facts: ServerFacts,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    results: ResultQueue,
    on_state: Callable[[], None],
    prefix: str,
    tiers: StoreTiers | None = None,
    rates: StepRates | None = None,
) -> VllmEngine:
    """Of the server that was found to be `facts`. It is ready once the server watches over it."""
    ratio = facts.block_size // server.blocks.block_size
    form = facts.moved.name if facts.moved is not None else b""
    mine = EngineFacts(facts.blocks * ratio, facts.block_bytes // ratio, form)
    model = VllmModel(facts.name, facts.context_length, facts.vocab_size, stop_ids, facts.slots, mine.blocks)
    live = LiveVllmSequences(model, server.blocks, Detokenizer(tokenizer), EngineCounters())
    return VllmEngine(live, mine, server, results, on_state, tiers or NoTiers(), rates or StepRates(), prefix)
