"""A worker dies by SIGKILL in the midst of a long sequence: its successor finds nearly all of it in the vault."""

from __future__ import annotations

import subprocess
import sys
import time

from kvfleet.worker.port.outputs import SequenceStarted
from kvfleet.worker.tiers.protection import PERIOD_S, PROTECT_S
from kvproto.messages import Sampling, Tokens
from tests.integration.worker_tiers.protected_worker import (
    PREFILL_TOKENS_PER_S,
    PROMPT,
    TOKENS_PER_S,
    ProtectedWorker,
)
from tests.integration.worker_tiers.rig import BLOCK_SIZE
from tests.integration.worker_tiers.test_vault_process import ROOM, VaultProcess, vault_process
from tests.unit.worker.engine_rig import expected_tokens

__all__ = ["vault_process"]

DIES_AFTER = 150  # generated tokens


def test_the_successor_computes_little_again(vault_process: VaultProcess) -> None:
    address = vault_process.start()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.worker_tiers.protected_worker", *address.data_plane],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOM,
        env={"PYTHONPATH": f"{ROOM / 'libs'}:{ROOM}"},
    )
    assert process.stdout is not None
    try:
        tokens = [int(process.stdout.readline()) for _ in range(DIES_AFTER)]
    finally:
        process.kill()
        tokens += [int(line) for line in process.communicate()[0].splitlines()]
    successor = ProtectedWorker(address)
    try:
        successor.add(tuple(tokens))
        began = time.monotonic()
        started: SequenceStarted | None = None
        later: list[int] = []
        while len(later) < 20:
            assert time.monotonic() - began < 20
            for output in successor.turn():
                if isinstance(output, SequenceStarted):
                    started = output
                elif isinstance(output, Tokens):
                    later += output.ids
        assert started is not None
        again = len(PROMPT) + len(tokens) - started.cached_tokens
        unprotected = PROTECT_S * PREFILL_TOKENS_PER_S + 3 * PERIOD_S * TOKENS_PER_S  # a busy machine's seconds
        assert again <= unprotected + BLOCK_SIZE < len(PROMPT), "else this would tell nothing"
        known = [*PROMPT, *tokens]
        assert later[:20] == expected_tokens(known, Sampling(20, temperature=0.0), context=2048)
    finally:
        successor.close()
