"""`python -m kvfleet.worker.model.parallel.follower STEPS BLOCKS`: a rank of a group beside its leader. Loop.

Two threads: the main one runs the model, the other moves bytes of blocks. Either ends the process, at once, when its
channel is closed, which is when the leader is gone: the main one may then be in an operation that waits for the leader.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kvproto.errors import KvfleetError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class RankProgress:
    """How many messages the main thread has obeyed; below 0 while it loads. Set by that thread."""

    count: int = -1
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def reached(self, count: int) -> None:
        with self._changed:
            self.count = count
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.count >= count)


@dataclass(eq=False)
class Rank:
    steps: Connection
    blocks: Connection
    progress: RankProgress = field(default_factory=RankProgress)

    def run(self) -> None:
        begin = pickle.loads(self.steps.recv_bytes())
        self._rank = begin.rank
        logging.basicConfig(level=logging.WARNING, format=f"rank {begin.rank}: %(name)s: %(message)s")
        threading.Thread(target=lambda: _ending(self._move_blocks), name="blocks", daemon=True).start()

        from kvfleet.worker.model.quick_imports import defer_compiler, keep_scan

        keep_scan()
        defer_compiler()
        from kvfleet.worker.model.parallel.rank import build_rank
        from kvfleet.worker.model.parallel.runner import FollowerRunner

        self.steps.send_bytes(b"")  # the leader may join
        runner = build_rank(begin, FollowerRunner, lambda loaded, blocks: None)
        assert isinstance(runner, FollowerRunner)
        self._runner = runner
        self.progress.reached(0)
        for count in range(1, sys.maxsize):
            answer = runner.obey(pickle.loads(self.steps.recv_bytes()))
            self.progress.reached(count)
            if answer is not None:
                self.steps.send_bytes(pickle.dumps(answer))

    def _move_blocks(self) -> None:
        packed = self.blocks.recv_bytes()
        self.progress.wait(0)

        import torch

        from kvfleet.worker.model.kv_pool import PoolMemory
        from kvfleet.worker.model.parallel.memory import move_part, receive_region
        from kvfleet.worker.model.parallel.messages import Region

        device, memory = self._runner.pool.device, self._runner.memory
        assert isinstance(memory, PoolMemory)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        regions: list[memoryview] = []
        while True:
            message = pickle.loads(packed)
            if isinstance(message, Region):
                regions.append(receive_region(self.blocks, message))
                memory.pin(regions[-1])
            else:
                self.progress.wait(message.after)
                move_part(memory, self._rank, regions[message.region], message)
                self.blocks.send_bytes(b"")
            packed = self.blocks.recv_bytes()


def _ending(work: object) -> None:
    """Do the work, then end the process, whatever its other thread does."""
    status = 1
    try:
        assert callable(work)
        work()
    except (EOFError, ConnectionError):
        status = 0  # the leader is gone
    except KvfleetError as error:
        log.error("%s", error.message)  # the leader fails too, and says so
    except BaseException:
        log.exception("this rank failed, and its group with it")
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    steps, blocks = (Connection(int(argument)) for argument in sys.argv[1:3])
    _ending(Rank(steps, blocks).run)


if __name__ == "__main__":
    main()
