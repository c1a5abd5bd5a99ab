"""An engine on the fake runner with a vault below it, as a process that can be killed: prints tokens as they come.

python -m tests.integration.worker_tiers.protected_worker VAULT_ADDRESS
"""

from __future__ import annotations

import sys
import time

from kvfleet.worker.blocks.block_codec import BlockShape
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.port.outputs import SequenceStarted
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.tiers import Tiers
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.block_hash import chain
from kvproto.messages import ChoiceFinished, Sampling, Tier, Tokens
from tests.integration.worker_tiers.rig import BLOCK_SIZE, HOST, KEYS, ROOT
from tests.support.id_detokenizer import IdDetokenizer

BLOCKS = 128
PREFILL_TOKENS_PER_S = 1000.0
TOKENS_PER_S = 100.0
SAMPLING = Sampling(1000, temperature=0.0, ignore_eos=True)
PROMPT = tuple(at * 13 % 997 for at in range(1000))


class ProtectedWorker:
    """Nothing of it is believed to be asked for again."""

    def __init__(self, vault: SourceAddress) -> None:
        runner = FakeRunner(
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=1000,
            context_length=2048,
            pace=FakePace(TOKENS_PER_S, PREFILL_TOKENS_PER_S),
        )
        memory = runner.memory
        self.remote = RemoteTiers(RemoteSettings("w", HOST, memory.kv_format, BlockShape(*memory.rows)), KEYS)
        self.remote.set_vaults([vault])
        while self.remote.speed(Tier.VAULT) is None:
            time.sleep(0.01)
        host = HostTier(memoryview(bytearray(BLOCKS * memory.block_bytes)), memory.block_bytes, BLOCK_SIZE)
        pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.tiers = Tiers(pool, memory, host, self.remote)
        self.engine = Engine(runner, pool, Scheduler(pool, token_budget=128), IdDetokenizer(), tiers=self.tiers)

    def add(self, outputs: tuple[int, ...] = ()) -> None:
        known = PROMPT + outputs
        names = names_of(ROOT, chain(ROOT, known, BLOCK_SIZE), known, BLOCK_SIZE)
        finding = self.remote.look(names, exact=False, peer="", on_ready=lambda: None, limit_s=2.0)
        while not finding.ready:
            time.sleep(0.001)
        asked = SequenceSpec("r", 0, PROMPT, SAMPLING, ROOT, output_ids=outputs, location=ChainLocation(names, finding))
        self.engine.add(asked)

    def turn(self) -> list[SequenceStarted | Tokens | ChoiceFinished]:
        self.engine.maintain()
        if not self.engine.has_work:
            time.sleep(0.001)
            return []
        result = self.engine.step()
        return [one for one in result.outputs if isinstance(one, SequenceStarted | Tokens | ChoiceFinished)]

    def close(self) -> None:
        self.tiers.close()
        self.remote.close()


def main() -> None:
    worker = ProtectedWorker(SourceAddress("v1", "e1", HOST, tuple(sys.argv[1:])))
    worker.add()
    while True:
        for output in worker.turn():
            if isinstance(output, Tokens):
                print(*output.ids, flush=True)


if __name__ == "__main__":
    main()
