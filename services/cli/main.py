"""The `kvfleet` command. Standard library only, as `pip install kvfleet` brings a producer's two libraries alone."""

from __future__ import annotations

import sys

from kvfleet import __version__
from kvfleet.cli.embedded.forks import begin
from kvfleet.cli.process_commands import PROCESS_COMMANDS, become
from kvservice import launch

EXTRAS = {"up": "all", "plan": "cli,worker", "kv-size": "cli,worker"}  # of commands that need more than their own


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
