"""Our engine with tiers, as a worker has them, in this process; a vault, if any, in another one.

Sequences are given what a worker's loop gives them: a look at the vaults when they arrive. Nothing goes through NATS,
so times are those of the engine and its tiers alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks.engine._engine import BLOCK, CORES, NO_HURRY, ROOT, OurRun, Ours, Step
from benchmarks.tiers._vault import Vault
from kvfleet.worker.blocks.block_codec import BlockShape, warm_up
from kvfleet.worker.blocks.chain_location import ChainLocation, names_of
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.loader import Device, Dtype, LoadFormat
from kvfleet.worker.port.outputs import SequenceFailed, SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.tiers.break_even import LOOK_WORTH_S
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.remote import RemoteTiers
from kvfleet.worker.tiers.source import SourceAddress
from kvfleet.worker.tiers.tiers import Tiers
from kvfleet.worker.tiers.transfers import RemoteSettings
from kvproto.block_hash import chain
from kvproto.dataplane.block import BlockCodec
from kvproto.messages import ChoiceFinished, Sampling, Tier, Tokens


class TieredOurs(Ours):
    """`host_blocks` 0: no host tier, and so nothing goes down. `address` instead of the vault's own: a proxy's.

    `keeps_all`: everything goes down at once, whatever experience says of its use.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Dtype = "auto",
        *,
        context: int,
        sequences: int = 2,
        threads: int = CORES,
        host_blocks: int = 0,
        vault: Vault | None = None,
        address: str | None = None,
        codec: BlockCodec = BlockCodec.RAW,
        keeps_all: bool = False,
        device_blocks: int | None = None,
        load_format: LoadFormat = "auto",
        itl_target_s: float = NO_HURRY,
        device: Device = "cpu",
    ) -> None:
        super().__init__(
            folder,
            dtype,
            threads=threads,
            sequences=sequences,
            context=context,
            load_format=load_format,
            itl_target_s=itl_target_s,
            blocks=device_blocks,
            device=device,
        )
        memory, pool = self.runner.memory, self.engine.pool
        self.codec = codec
        self.woken = threading.Event()
        self.remote: RemoteTiers | None = None
        self.host = HostTier(memory.host_memory(host_blocks * memory.block_bytes), memory.block_bytes, BLOCK)
        if vault is not None:
            warm_up()
            settings = RemoteSettings("bench", "here", memory.kv_format, BlockShape(*memory.rows), codec)
            self.remote = RemoteTiers(settings, vault.keyring)
            addresses = (address,) if address is not None else vault.addresses
            self.remote.set_vaults([SourceAddress(vault.name, "e1", "here", addresses)])
            while self.remote.speed(Tier.VAULT) is None:
                time.sleep(0.01)
        self.tiers = Tiers(pool, memory, self.host, self.remote, self.woken.set)
        if keeps_all:
            self.tiers.reuse.is_worth = lambda root, offload_s, recompute_s: True  # type: ignore[method-assign]
        scheduler = self.engine.scheduler
        self.engine = Engine(self.runner, pool, scheduler, self.engine.sequences.detokenizer, tiers=self.tiers)
        self._numbers = count()

    def close(self) -> None:
        self.tiers.close()
        if self.remote is not None:
            self.remote.close()

    def add(self, prompt: Sequence[int], max_tokens: int, *, looks: bool = True) -> str:
        name = str(next(self._numbers))
        location = None
        worth = len(prompt) > max(BLOCK, LOOK_WORTH_S * self.engine.rates().prefill_tokens_per_s)
        if looks and self.remote is not None and worth:
            names = names_of(ROOT, chain(ROOT, prompt, BLOCK), prompt, BLOCK)
            location = ChainLocation(names, self.remote.look(names, exact=False, peer="", on_ready=self.woken.set))
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(SequenceSpec(name, 0, tuple(prompt), sampling, ROOT, location=location))
        return name

    def turn(self) -> StepResult | None:
        """What the engine's thread does in one round: tend to the tiers, then a step, or a rest."""
        self.woken.clear()
        self.engine.maintain()
        if not self.engine.has_work:
            self.woken.wait(due_in if (due_in := self.tiers.restorer.due_in()) is not None else 0.01)
            return None
        result = self.engine.step()
        for output in result.outputs:
            if isinstance(output, SequenceFailed):
                raise output.error
        if not result.sequences and not result.outputs:
            self.woken.wait(0.001)
        return result

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, looks: bool = True) -> OurRun:
        """See `Ours`; without `looks` nobody asks the vault."""
        began = time.perf_counter()
        at = {self.add(prompt, max_tokens, looks=looks): index for index, prompt in enumerate(prompts)}
        run = OurRun(0.0, [[] for _ in prompts], [0.0] * len(prompts), [0] * len(prompts))
        self.restored: list[dict[Tier, int]] = [{} for _ in prompts]
        left = len(prompts)
        while left:
            result = self.turn()
            if result is None:
                continue
            now = time.perf_counter() - began
            run.steps.append(Step(now, result.seconds, result.sequences, result.prefill_tokens, result.fed_tokens))
            for output in result.outputs:
                index = at[output.request]
                if isinstance(output, SequenceStarted):
                    run.cached[index] = output.cached_tokens
                    self.restored[index] = output.restored
                elif isinstance(output, Tokens):
                    run.ttft_s[index] = run.ttft_s[index] or now
                    run.tokens[index] += output.ids
                elif isinstance(output, ChoiceFinished):
                    left -= 1
        run.seconds = time.perf_counter() - began
        return run

    def settle(self) -> None:
        """Until nothing is on its way down."""
        offloader = self.tiers.offloader
        while offloader.has_work or offloader.held_on_host():
            self.turn()

    def flush(self, *tiers: Tier) -> None:
        """Others need all blocks of these tiers, as if they had come."""
        self.settle()
        pools = {Tier.DEVICE: self.engine.pool, Tier.HOST: self.host.pool}
        for tier in tiers:
            pool = pools[tier]
            pool.release(pool.allocate(pool.available))
        self.engine.maintain()
