"""A forward pass given up between two layers leaves nothing behind: the same prompt gives what it always gave."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from test_against_transformers import assert_exact, tokens
from tiny_models import Rig

from kvfleet.worker.model.base import Abort

PROMPT = 200


class SoonAsked(Abort):
    """Somebody cancels `gone` while the `layer`-th layer (from 0) of its next pass has its turn."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.before = layer

    def check(self) -> None:
        if not self.before:
            self.ask("gone", 0)
        self.before -= 1
        super().check()


@pytest.mark.parametrize("chunk", [88, 40])  # longer and shorter than what layers compute in a row
def test_an_aborted_chunk_changes_nothing(chunk: int, representative: Any, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(representative, blocks=60, block_size=16, budget=chunk)
    chance = random.Random(chunk)
    prompt = tokens(chance, PROMPT)
    for layer in (0, 1):
        rig.add("gone", prompt)
        while (running := rig.scheduler.running) == [] or running[0].computed < chunk:
            rig.step()
        before = running[0].computed
        abort = rig.runner.abort = SoonAsked(layer)
        rig.engine.step()
        aborted = rig.engine.counters.steps_aborted_total
        assert aborted == 1 or chunk == 40, "short passes are one call, after a look at the first layer alone"
        assert abort.before < 0
        assert not aborted or running[0].computed == before
        rig.engine.cancel("gone", 0)
        rig.engine.check_integrity()
        assert rig.pool.used == 0
        assert [type(output).__name__ for output in rig.engine.step().outputs] == ["SequenceFailed"]
        rig.engine.counters.steps_aborted_total = 0
        rig.runner.noted.clear()
        del rig.turns["gone"], rig.logits["gone"]
        rig.runner.abort = Abort()
    again = rig.add("again", prompt, 12)
    other = rig.add("other", [*prompt[: chunk + 3], *tokens(chance, 20)], 12)
    rig.run()
    assert again.cached >= chunk
    assert other.cached >= chunk
    assert_exact(rig)
