"""Loop: the processes of an embedded fleet while it runs. One that ends is started again, or given up."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfleet.cli.console import err
from kvfleet.cli.embedded.autoscaler import LocalAutoscaler
from kvfleet.cli.embedded.processes import Child, FleetEnded, StopRequest, stop

STOP_WITHIN_S = 9.0
ENGINES_STOP_S = 4.0  # more, where there are engines: a share of it is longer than vLLM's guard takes
LOOK_EVERY_S = 0.05
JOIN_S = 0.5  # when all processes are gone: the fleet's own time to stop is up by then


@dataclass
class EmbeddedFleet:
    """Owned by `up`. `listener` is the ingress's socket, held here too: clients wait on it for a new ingress."""

    listener: socket.socket | None = None
    nats: list[Child] = field(default_factory=list)
    vaults: list[Child] = field(default_factory=list)
    placements: list[Child] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    ingresses: list[Child] = field(default_factory=list)
    autoscaler: LocalAutoscaler | None = None

    def __iter__(self) -> Iterator[Child]:
        yield from (*self.nats, *self.vaults, *self.placements, *self.engines, *self.workers, *self.ingresses)

    @property
    def engines(self) -> list[Child]:
        return [worker.engine for worker in self.workers if worker.engine is not None]

    def watch(self, stopping: StopRequest, forget: Callable[[Child], None]) -> None:
        """Start each process that ends again; give up one that keeps ending, and a worker that was to drain, however it
        ended; a worker and its engine together. Calls `forget` for workers that were drained or are replaced.

        Raises FleetEnded when NATS, the ingress or the last worker is given up. Without vaults or placement a fleet is
        only slower.
        """
        autoscaler = self.autoscaler
        while not stopping.wait(LOOK_EVERY_S):
            for child in self:
                if child.running or child.given_up:
                    continue
                code = child.process.returncode
                if child in self.workers and (code == 0 or child.draining):  # it ends with 0 when it was drained
                    child.given_up = True
                    how = f"ended with code {code} while it drained" if code else "was drained"
                    err.print(f"kvfleet: {child.name} {how}")
                    forget(child)
                elif child.start_again(time.monotonic()):
                    err.print(f"kvfleet: {child.name} ended with code {code}; starting it again")
                elif child in self.nats or child in self.ingresses:
                    raise FleetEnded(f"{child.name} ended again and again, last with code {code}")
                else:
                    err.print(f"kvfleet: {child.name} ended again and again, given up")
                    if autoscaler is not None and child in self.workers:
                        forget(child)
            for worker in self.workers:
                if worker.engine is None or worker.given_up == worker.engine.given_up:
                    continue
                if worker.given_up:
                    worker.engine.given_up = True
                    worker.engine.signal(signal.SIGTERM)
                else:
                    worker.given_up = True
                    worker.kill()
                    if autoscaler is not None:
                        forget(worker)
            if autoscaler is not None:
                autoscaler.maintain()
            may_be_none = autoscaler is not None and autoscaler.may_be_none
            if not may_be_none and all(worker.given_up for worker in self.workers):
                raise FleetEnded("no worker is left")

    def stop(self) -> None:
        """The autoscaler is told first and waited for last: its requests end with the processes."""
        if self.autoscaler is not None:
            self.autoscaler.stopping.set()
        if self.listener is not None:
            self.listener.close()  # first: clients must not wait for an ingress that does not come
        engines = self.engines
        groups = (self.ingresses, self.workers, [*engines, *self.vaults, *self.placements], self.nats)
        stop(groups, STOP_WITHIN_S + (ENGINES_STOP_S if engines else 0.0))
        if self.autoscaler is not None and self.autoscaler.thread.is_alive():
            self.autoscaler.thread.join(JOIN_S)
        self.autoscaler = None
