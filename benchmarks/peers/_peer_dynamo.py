"""NVIDIA Dynamo's prefix index, the `RadixTree` of ai-dynamo-runtime, under the load of `_index_load`.

A program of the peer's own interpreter, asked by `placement_vs_dynamo` and answering it in JSON lines; standard library
and the peer only. The tree takes events as JSON, one for what is stored and one for what is removed, and prompts as a
list of the hashes of their blocks' tokens; both are made before the time runs. Of our 16 bytes of hash the first 8 are
the block's hash in its events, the others its tokens': the tree hashes nothing, and all its numbers are in the load.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
import time
from struct import unpack
from typing import Any

from dynamo._core import RadixTree

from benchmarks.placement._index_load import HEARD_BETWEEN, RUN, WORKERS, Event, Load


class Dynamo:
    def __init__(self, load: Load) -> None:
        self.tree = RadixTree()
        self._load = load
        self._heard = 0
        for event in load.fill():
            self.hear(event)
        gc.collect()
        gc.freeze()

    def encode(self, event: Event) -> list[tuple[int, bytes]]:
        bodies: list[dict[str, Any]] = []
        if event.removed:
            bodies.append({"removed": {"block_hashes": [block_hash(one) for one in event.removed]}})
        blocks = [{"block_hash": block_hash(one), "tokens_hash": tokens_hash(one)} for one in event.stored]
        parent = block_hash(event.parent) if event.parent else None
        bodies.append({"stored": {"parent_hash": parent, "blocks": blocks}})
        made = []
        for body in bodies:
            self._heard += 1
            text = json.dumps({"event_id": self._heard, "data": body, "dp_rank": 0}, separators=(",", ":"))
            made.append((event.worker, text.encode()))
        return made

    def hear(self, event: Event) -> None:
        for worker, data in self.encode(event):
            self.tree.apply_event(worker, data)

    # ------------------------------------------------------------------ what is asked for

    def apply(self, count: int) -> dict[str, Any]:
        heard = [one for event in self._load.steady(count) for one in self.encode(event)]
        apply_event = self.tree.apply_event
        began = time.perf_counter()
        for worker, data in heard:
            apply_event(worker, data)
        self.tree.find_matches([0])  # its thread has done what it was given before
        seconds = time.perf_counter() - began
        for worker in range(WORKERS):
            hashes, depth = self._load.newest(worker)
            assert self.tree.find_matches(list(map(tokens_hash, hashes))).scores[worker, 0] == depth, (
                "an event was lost"
            )
        return {"rate": 2 * RUN * count / seconds}

    def find(self, length: int, distinct: int, count: int) -> dict[str, Any]:
        hits = []
        for prompt in self._load.prompts(length, distinct, count):
            for event in self._load.steady(HEARD_BETWEEN):
                self.hear(event)
            asked = list(map(tokens_hash, prompt.hashes))
            began = time.perf_counter()
            found = self.tree.find_matches(asked).scores
            seconds = time.perf_counter() - began
            assert found == {(worker, 0): depth for worker, depth in enumerate(prompt.depths) if depth}, (
                "a wrong answer"
            )
            if prompt.is_hit:
                hits.append(seconds)
        return {"hits": hits}


def block_hash(one: bytes) -> int:
    number: int = unpack("<Q", one[:8])[0]
    return number


def tokens_hash(one: bytes) -> int:
    number: int = unpack("<Q", one[8:])[0]
    return number


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints goes to stderr, not between the answers
    peer = Dynamo(Load())
    answers.write(json.dumps({"version": importlib.metadata.version("ai-dynamo-runtime")}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(getattr(peer, command.pop("do"))(**command)) + "\n")


if __name__ == "__main__":
    main()
