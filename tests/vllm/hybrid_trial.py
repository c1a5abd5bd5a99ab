"""A script for the interpreter that has vLLM: a hybrid model in one process, and our connector in it; what it saves is
restored, and the text has to be that of a run without a break. `python hybrid_trial.py MODEL DTYPE FOLDER`."""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvfleet_vllm.wire import (
    VERSION,
    BlocksRead,
    BlocksSaved,
    BlocksSaving,
    Decoder,
    EngineHello,
    GrantSlots,
    Message,
    Scheduled,
    StateSaving,
    WorkerHello,
    encode,
)
from tests.support.tier_sidecar import TierSidecar

Drawn = tuple[int, float]  # a token and its log probability

PROMPT, OUTPUTS, SLOTS = 1000, 120, 256
CHUNK = 512  # tokens a step
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}  # of log probabilities, as one token may be computed by another kernel


class Sidecar(TierSidecar):
    """Of the scheduler and its worker, which has a connection of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SLOTS, 8)
        self._links: list[tuple[Any, Decoder]] = []

    def heard(self) -> list[Message]:
        found: list[Message] = []
        try:
            while True:
                link, _ = self._listener.accept()
                link.setblocking(False)
                self._links.append((link, Decoder()))
        except BlockingIOError:
            pass
        for link, decoder in self._links:
            try:
                while data := link.recv(1 << 16):
                    found += decoder.feed(data)
            except BlockingIOError:
                pass
        return found

    def hang_up(self) -> None:
        for link, _ in self._links:
            link.close()
        self._links.clear()

    def grant(self, slots: Sequence[int]) -> None:
        self._links[0][0].sendall(encode([GrantSlots(tuple(slots))]))


class Engine:
    """A first run of a prompt, all of which is saved: the text, and where its blocks and states lie."""

    def __init__(self, model: str, dtype: str, folder: Path) -> None:
        self.sidecar, self.rounding = Sidecar(folder), ROUNDING[dtype]
        self.llm = LLM(
            model, dtype=dtype, enforce_eager=True, block_size=32, max_model_len=2048, max_num_batched_tokens=CHUNK,
            skip_tokenizer_init=True, enable_prefix_caching=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvfleetConnector", kv_connector_module_path="kvfleet_vllm.connector", kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
        )  # fmt: skip
        self.run([5], 1, {"version": VERSION, "socket": self.sidecar.path})
        told = {type(one): one for one in self.sidecar.heard()}
        hello, worker = told[EngineHello], told[WorkerHello]
        assert isinstance(hello, EngineHello)
        assert isinstance(worker, WorkerHello)
        assert worker.format
        self.kinds = [one["kind"] for one in hello.facts["kv_cache_groups"]]
        self.tokens = hello.facts["kv_cache_groups"][0]["block_size"]
        self.sidecar.file.write_bytes(bytes(SLOTS * worker.block_bytes))
        self.sidecar.grant(range(SLOTS))
        rolls = random.Random(3)
        self.prompt = [rolls.randrange(5, 1000) for _ in range(PROMPT)]
        self.outputs, _ = self.run(self.prompt, OUTPUTS, self.asked(save_from=0))
        self.blocks: list[int] = []
        self.states: dict[int, tuple[int, ...]] = {}
        saved = set()
        for one in self.sidecar.heard():
            if isinstance(one, BlocksSaving):
                assert one.at == len(self.blocks)
                self.blocks += one.slots
            elif isinstance(one, StateSaving):
                self.states[one.at] = one.slots
            elif isinstance(one, BlocksSaved):
                saved.update(one.slots)
        assert saved == {*self.blocks, *(slot for slots in self.states.values() for slot in slots)}

    def asked(self, slots: Sequence[int] = (), state: Sequence[int] = (), save_from: int | None = None) -> Any:
        params: dict[str, Any] = {"version": VERSION, "socket": self.sidecar.path, "save_from": save_from}
        params["store"] = {"path": str(self.sidecar.file), "slots": SLOTS, "block_tokens": self.tokens}
        return params | {"restore": {"at": 0, "slots": list(slots), "state": list(state)}}

    def run(self, ids: Sequence[int], count: int, params: Any = None) -> tuple[list[Drawn], int]:
        """What it continues with, and how many of the prompt's tokens were there."""
        extra = None if params is None else {"kv_transfer_params": {"kvfleet": params}}
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0, extra_args=extra
        )
        (answer,) = self.llm.generate({"prompt_token_ids": list(ids)}, sampling, use_tqdm=False)
        (told,) = answer.outputs
        drawn = [(token, by_id[token].logprob) for token, by_id in zip(told.token_ids, told.logprobs, strict=True)]
        return drawn, answer.num_cached_tokens or 0

    def restored(self, end: int, state: Sequence[int], blocks: Sequence[int] | None = None) -> tuple[bool, int]:
        """The first run's prompt, or more of it, with so many blocks that are brought. Whether it goes on as it did."""
        ids = (self.prompt + [token for token, _ in self.outputs])[: max(PROMPT, end * self.tokens + 1)]
        rest = self.outputs[len(ids) - PROMPT :]
        params = self.asked(self.blocks[:end] if blocks is None else blocks, state)
        drawn, cached = self.run(ids, len(rest), params)
        apart = max(abs(one - other) for (_, one), (_, other) in zip(drawn, rest, strict=True))
        print(f"{end}: {apart:.2g}")
        same_text = [token for token, _ in drawn] == [token for token, _ in rest]
        return same_text and apart < self.rounding, cached

    @property
    def ends(self) -> list[int]:
        """Where it can be gone on from: at states, or anywhere."""
        return sorted(self.states) or [1, 4, PROMPT // self.tokens, len(self.blocks)]

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()
        self.sidecar.heard()


def what_was_saved(engine: Engine) -> None:
    assert len(engine.blocks) == (PROMPT + OUTPUTS - 1) // engine.tokens
    assert bool(engine.states) == ("mamba" in engine.kinds)
    if engine.states:  # where a chunk ended, at the end of the prompt, and behind it
        last = (PROMPT - 1) // engine.tokens
        chunk = CHUNK // engine.tokens
        assert sorted(engine.states) == sorted({chunk, min(2 * chunk, last), *range(last, len(engine.blocks) + 1)})


def wherever_it_goes_on_from_the_text_is_the_same(engine: Engine) -> None:
    for end in engine.ends:
        engine.forget()
        assert engine.restored(end, engine.states.get(end, ())) == (True, end * engine.tokens), end
        told = engine.sidecar.heard()
        (scheduled,) = (one for one in told if isinstance(one, Scheduled))
        (read,) = (one for one in told if isinstance(one, BlocksRead))
        assert (scheduled.cached, scheduled.restored) == (0, end * engine.tokens)
        assert read.blocks == end + len(engine.states.get(end, ()))


def what_vllm_has_is_not_brought(engine: Engine) -> None:
    engine.forget()
    first, last = engine.ends[0], engine.ends[-1]
    assert engine.restored(first, engine.states.get(first, ()), engine.blocks[:first])[0]
    engine.sidecar.heard()
    assert engine.restored(last, engine.states.get(last, ())) == (True, last * engine.tokens)
    (scheduled,) = (one for one in engine.sidecar.heard() if isinstance(one, Scheduled))
    assert scheduled.cached > 0
    assert scheduled.cached + scheduled.restored == last * engine.tokens


def other_content_makes_another_text(engine: Engine) -> None:
    """So these trials see it."""
    end, other = (PROMPT - 1) // engine.tokens, engine.ends[0]
    for blocks, state in (
        (engine.blocks[:end], engine.states.get(other)),
        (engine.blocks[:1] * end, engine.states.get(end, ())),
    ):
        if state is not None:
            engine.forget()
            assert engine.restored(end, state, blocks) == (False, end * engine.tokens)


def without_its_state_nothing_is_brought(engine: Engine) -> None:
    if engine.states:
        end = engine.ends[-1]
        for state in ((), (*engine.states[end], 0)):
            engine.forget()
            assert engine.restored(end, state)[1] == 0
        for one in engine.sidecar.heard():
            assert not isinstance(one, BlocksRead) or one.blocks == 0


def a_load_that_fails_is_computed(engine: Engine) -> None:
    end = engine.ends[0]
    for _ in range(2):
        engine.forget()
        lost = engine.restored(end, engine.states.get(end, ()), [*engine.blocks[: end - 1], SLOTS])
        assert lost == (True, 0)
    engine.forget()
    engine.sidecar.hang_up()
    engine.run([5], 1, engine.asked())  # all of vLLM greets again
    assert engine.restored(end, engine.states.get(end, ())) == (True, end * engine.tokens)


TRIALS = (
    what_was_saved, wherever_it_goes_on_from_the_text_is_the_same, what_vllm_has_is_not_brought,
    other_content_makes_another_text, without_its_state_nothing_is_brought, a_load_that_fails_is_computed,
)  # fmt: skip


def main(model: str, dtype: str, folder: Path) -> None:
    engine, failed = Engine(model, dtype, folder), {}
    for trial in TRIALS:
        try:
            trial(engine)
            failed[trial.__name__] = ""
        except Exception:  # noqa: BLE001
            failed[trial.__name__] = traceback.format_exc()
    print("\n" + json.dumps(failed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
