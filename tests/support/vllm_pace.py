"""A logits processor of vLLM's that gives every step of a tiny model the time that a step of a large one takes.

Flags with it: `PACED` of tests.support.vllm_server.

Without it a stream of 900 tokens may be over before the test's process, on a machine with two cores, sees its third.
"""

from __future__ import annotations

import os
import time

from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_S = float(os.environ.get("PACE_STEP_S", "0.005"))


class Pace(LogitsProcessor):
    def __init__(self, *_: object) -> None:
        pass

    def apply(self, logits):  # type: ignore[no-untyped-def]
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, _: object) -> None:
        time.sleep(STEP_S)
