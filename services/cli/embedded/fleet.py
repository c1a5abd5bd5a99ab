"""Loop: the processes of an embedded fleet while it runs: one that ends is started again, or given up."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfleet.cli.console import err
from kvfleet.cli.embedded.autoscaler import LocalAutoscaler
from kvfleet.cli.embedded.processes import Child, FleetEnded, StopRequest, stop

STOP_WITHIN_S = 9.0
LOOK_EVERY_S = 0.05


@dataclass
class EmbeddedFleet:
    """The processes of one embedded fleet. Owned by `up`.

    `listener` is the ingress's socket, held here too: who connects while the ingress starts again waits for it.
    """

    listener: socket.socket | None = None
    nats: list[Child] = field(default_factory=list)
    vaults: list[Child] = field(default_factory=list)
    placements: list[Child] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    ingresses: list[Child] = field(default_factory=list)

    def __iter__(self) -> Iterator[Child]:
        yield from (*self.nats, *self.vaults, *self.placements, *self.workers, *self.ingresses)

    def watch(
        self,
        stopping: StopRequest,
        autoscaler: LocalAutoscaler | None = None,
        forget: Callable[[Child], None] = lambda worker: None,
    ) -> None:
        """Until asked to stop. A process that ends is started again; one that keeps ending is given up, and so is a
        worker that was to drain, however it ended. `forget` is told of workers that were drained, or are replaced.

        Raises FleetEnded when NATS or the ingress is given up, or the last worker. Without vaults or placement a fleet
        is only slower.
        """
        while not stopping.wait(LOOK_EVERY_S):
            for child in self:
                if child.running or child.given_up:
                    continue
                code = child.process.returncode
                told = autoscaler is not None and autoscaler.drains(child)
                if child in self.workers and (code == 0 or told):  # it ends with 0 when it was drained
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
            if autoscaler is not None:
                autoscaler.maintain(self.workers)
            if all(worker.given_up for worker in self.workers):
                raise FleetEnded("no worker is left")

    def stop(self) -> None:
        if self.listener is not None:
            self.listener.close()  # first: without an ingress to come, nobody is to wait for one
        stop((self.ingresses, self.workers, [*self.vaults, *self.placements], self.nats), STOP_WITHIN_S)

    def end(self, autoscaler: LocalAutoscaler | None) -> None:
        """Stop, with its autoscaler, which is not waited for before the processes are gone."""
        if autoscaler is not None:
            autoscaler.stop()
        self.stop()
        if autoscaler is not None:
            autoscaler.join()
