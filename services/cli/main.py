"""The `kvfleet` command. Standard library only, as `pip install kvfleet` brings a producer's two libraries alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvfleet import __version__
from kvfleet.cli.embedded.forks import begin
from kvservice import launch


class ProcessCommand(NamedTuple):
    """A command that becomes a process of a service."""

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
EXTRAS = {"up": "all", "plan": "cli,worker", "kv-size": "cli,worker"}  # of commands that need more than their own


def become(command: str, flags: Sequence[str]) -> NoReturn:
    """The service's own settings class parses the flags: they cannot drift from what it reads."""
    os.execv(sys.executable, launch.command(PROCESS_COMMANDS[command].module, *flags))


def main() -> None:
    command, *flags = sys.argv[1:] or [""]
    if command == "--version":
        sys.stdout.write(f"{__version__}\n")
        return
    if command in PROCESS_COMMANDS:
        become(command, flags)
    if command == "up":
        begin(flags)
    launch.with_extra(EXTRAS.get(command, "cli"), lambda: launch.imported("kvfleet.cli.commands").app())


if __name__ == "__main__":
    main()
