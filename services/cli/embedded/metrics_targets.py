"""Where Prometheus finds the processes of an embedded fleet: a port of its own for each, and a file that lists them in
the form of `file_sd_configs`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvfleet.cli.embedded.ports import PortTaken

FOLDER = "targets"
FILE = "kvfleet.json"


class MetricsTargets:
    """`base`: the first of consecutive ports; 0: any free ones; None: nobody has one. `claim` checks a port, or chooses
    one for 0; it raises PortTaken."""

    def __init__(self, base: int | None, claim: Callable[[int], int]) -> None:
        self._base = base
        self._claim = claim
        self._addresses: dict[tuple[str, str], tuple[str, int]] = {}

    def flags(self, service: str, member: str, host: str = "127.0.0.1", *, or_any: bool = False) -> list[str]:
        """What the process is started with: the first port that is nobody's here. It keeps it when it is started again.
        Raises PortTaken if a stranger has it; with `or_any` a free one is taken instead."""
        if self._base is None:
            return []
        taken = {port for _, port in self._addresses.values()}
        wanted = next(port for port in itertools.count(self._base) if port not in taken) if self._base else 0
        try:
            port = self._claim(wanted)
        except PortTaken:
            if not or_any:
                raise
            port = self._claim(0)
        while port in taken:  # a free one, that nobody listens at yet
            port = self._claim(0)
        self._addresses[service, member] = host, port
        return [f"--metrics-port={port}"]

    def forget(self, service: str, member: str) -> None:
        """Of a process that is gone and does not come back. Its port is free for another one."""
        self._addresses.pop((service, member), None)

    def write(self, state: Path) -> Path | None:
        """Returns the file, if there is anything to list."""
        if self._base is None:
            return None
        folder = state / FOLDER
        folder.mkdir(exist_ok=True)
        listed = [
            {"targets": [f"{host}:{port}"], "labels": {"service": service, "member": member}}
            for (service, member), (host, port) in self._addresses.items()
        ]
        fresh = folder / f".{FILE}"
        fresh.write_text(json.dumps(listed, indent=2) + "\n")
        os.replace(fresh, folder / FILE)  # who reads it meanwhile sees the old or the new one
        return folder / FILE
