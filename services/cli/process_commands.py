"""Commands that become a process of a service. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvservice import launch


class ProcessCommand(NamedTuple):
    module: str
    told: str


PROCESS_COMMANDS = {
    **{
        service: ProcessCommand(f"kvfleet.{service}.main", f"Run one {service} process (settings: --help).")
        for service in ("worker", "ingress", "placement", "vault")
    },
    "simulate": ProcessCommand(
        "kvfleet.placement.simulate.main", "Replay a trace or a ledger with other policies (flags: --help)."
    ),
}


def become(command: str, flags: Sequence[str]) -> NoReturn:
    """The service's own settings class parses the flags: they cannot drift from what it reads."""
    os.execv(sys.executable, launch.command(PROCESS_COMMANDS[command].module, *flags))
