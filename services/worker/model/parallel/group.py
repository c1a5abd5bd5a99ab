"""The leader's side of a group: its followers' processes, what it tells them, and how the group ends.

    leader   ──▶ steps   one channel to each follower: passes and copies in order, from the thread that runs steps
             ──▶ blocks  another: bytes of blocks, from any thread, beside steps

A group ends as a whole. A follower ends when its channels do, thus with its leader. When a follower ends, or does not
come out of a step in time, the leader's step fails, and the worker with it. Loop.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kvfleet.worker.model.parallel.messages import Begin, RankPlan
from kvproto.errors import EngineFailure

log = logging.getLogger(__name__)

STEP_LIMIT_S = 120.0
POLL_S = 0.1
GRACE_S = 30.0  # until operations with a follower that is gone have failed


@dataclass(frozen=True, slots=True)
class FollowerProcess:
    process: subprocess.Popen[bytes]
    steps: Connection
    blocks: Connection

    @classmethod
    def start(cls, begin: Begin) -> FollowerProcess:
        (steps, its_steps), (blocks, its_blocks) = Pipe(), Pipe()
        theirs = (its_steps.fileno(), its_blocks.fileno())
        command = [sys.executable, "-m", "kvfleet.worker.model.parallel.follower", *map(str, theirs)]
        # A terminal's signals reach the leader alone: followers run until it has drained.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs, start_new_session=True)
        its_steps.close()
        its_blocks.close()
        steps.send_bytes(pickle.dumps(begin))
        return cls(process, steps, blocks)


class RankGroup:
    """Owns the followers. `told` counts the messages to them; moves of blocks come after the first `done` of them."""

    def __init__(self, plan: RankPlan, limit_s: float = STEP_LIMIT_S) -> None:
        self.plan = plan
        self.told = self.done = 0
        self.lost = ""  # why the group is over
        self._limit_s = limit_s
        self._folder = tempfile.mkdtemp(prefix="kvfleet-group-")
        self._begins = [Begin(plan, rank, Path(self._folder) / "meeting") for rank in range(plan.ranks)]
        self.followers = [FollowerProcess.start(begin) for begin in self._begins[1:]]
        self._deadlines: dict[int, float] = {}  # of the threads that wait for followers
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._run, name="group", daemon=True)
        self._watch.start()
        atexit.register(self.close)

    def meet(self) -> Begin:
        """Wait until the followers can join; returns what the leader begins with. Raises EngineFailure."""
        with self.watched(loading=True):
            for follower in self.followers:
                follower.steps.recv_bytes()
        return self._begins[0]

    def met(self) -> None:
        """All ranks have joined."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def watched(self, *, loading: bool = False) -> Iterator[None]:
        """What waits for followers, for as long as a step may take, or loading. Raises EngineFailure, which ends the
        group: ranks that part in a pass do not meet again."""
        if self.lost:
            raise EngineFailure(self.lost)
        thread = threading.get_ident()
        before = self._deadlines.get(thread)
        self._deadlines[thread] = math.inf if loading else time.monotonic() + self._limit_s
        try:
            yield
        except (OSError, EOFError, RuntimeError, MemoryError) as error:
            self._fail(f"a group of {self.plan.ranks} processes ended: {error or type(error).__name__}")
            raise EngineFailure(self.lost) from error
        finally:
            if before is None:
                del self._deadlines[thread]
            else:
                self._deadlines[thread] = before

    def tell(self, message: Any) -> None:
        """Only within `watched`, and by the thread that runs steps."""
        packed = pickle.dumps(message)
        for follower in self.followers:
            follower.steps.send_bytes(packed)
        self.told += 1

    def ask(self, message: Any) -> list[Any]:
        """The followers' answers, by rank."""
        with self.watched():
            self.tell(message)
            answers = [pickle.loads(follower.steps.recv_bytes()) for follower in self.followers]
        self.done = self.told
        return answers

    def close(self) -> None:
        """Idempotent. Followers end with their channels."""
        atexit.unregister(self.close)
        self._closed.set()
        self._watch.join()
        self.lost = self.lost or "the group is closed"
        for follower in self.followers:
            follower.steps.close()
            follower.blocks.close()
        for follower in self.followers:
            try:
                follower.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        # NCCL's waits for the others, which are gone.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        self.met()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            gone = [rank for rank, one in enumerate(self.followers, 1) if one.process.poll() is not None]
            if gone:
                self._fail(f"rank {gone[0]} of {self.plan.ranks} ended ({self.followers[gone[0] - 1].process.poll()})")
            elif any(deadline < time.monotonic() for deadline in list(self._deadlines.values())):
                self._fail(f"a step on {self.plan.ranks} ranks took longer than {self._limit_s:g} s")
            if self.lost:
                self._leave()
                return

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = why
        log.error("%s", why)
        for follower in self.followers:
            follower.process.kill()

    def _leave(self) -> None:
        """Gloo's operations fail when a peer is gone. NCCL's may not, and nothing can interrupt them: then the process
        ends here, as a worker does whose engine has failed."""
        waiting = dict(self._deadlines)
        self._closed.wait(GRACE_S)
        if any(self._deadlines.get(thread) == deadline for thread, deadline in waiting.items()):
            log.critical("a step waits for a rank that is gone; the worker ends")
            os._exit(1)
