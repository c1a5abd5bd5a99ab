"""Runs plans in processes of their own, so many at once: each is a copy of a process whose fleet has just started, so
that no run sees what another left, and none starts a fleet of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from tests.dst import guard
from tests.dst.plan import Plan
from tests.dst.trial import Answers, Outcome, Trial, run

# Without what Python does after a fork: it would call all simulated threads dead.
_fork: Callable[[], int] = ctypes.PyDLL(None).fork


class Runner:
    """`outcomes` may be called again and again. Owns the children, and the fleet that is ready."""

    def __init__(self, answers: Mapping[bool, Answers], jobs: int) -> None:
        """`answers`: of models that are hybrid, and that are not."""
        self._answers, self._jobs = answers, jobs
        self._ready: Trial | None = None
        gc.disable()
        gc.freeze()

    def outcomes(self, plans: Iterable[Plan], *, traces: bool = False) -> Iterator[tuple[Plan, Outcome]]:
        """In the order of the plans."""
        running: deque[tuple[Plan, int, int]] = deque()
        for plan in plans:
            if len(running) == self._jobs:
                yield _ended(*running.popleft())
            running.append((plan, *self._begun(plan, traces)))
        while running:
            yield _ended(*running.popleft())

    def outcome(self, plan: Plan, *, traces: bool = False) -> Outcome:
        return next(self.outcomes([plan], traces=traces))[1]

    def _begun(self, plan: Plan, traces: bool) -> tuple[int, int]:
        """Its pid, and where its outcome is to be read."""
        ready = self._started(plan)
        reader, writer = os.pipe()
        pid = _fork()
        if pid:
            os.close(writer)
            return pid, reader
        os.close(reader)
        guard.begin()
        try:
            found = run(plan, self._answers[plan.hybrid], ready, traces=traces)
        except BaseException:  # noqa: BLE001 - the parent tells it
            found = Outcome([f"crash: {traceback.format_exc()}"])
        data = pickle.dumps(found)
        while data:
            data = data[os.write(writer, data) :]
        os._exit(0)

    def _started(self, plan: Plan) -> Trial:
        ready = self._ready
        if ready is None or (ready.group, ready.fleet) != (plan.group, plan.fleet):
            if ready is not None:
                ready.world.close()
            self._ready = ready = None
            gc.collect()
            self._ready = ready = Trial(plan)
            ready.start()
        return ready


def _ended(plan: Plan, pid: int, reader: int) -> tuple[Plan, Outcome]:
    data = b""
    while some := os.read(reader, 1 << 16):
        data += some
    os.close(reader)
    os.waitpid(pid, 0)
    found: Outcome = pickle.loads(data) if data else Outcome(["crash: the process ended"])
    return plan, found
