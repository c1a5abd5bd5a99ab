"""CPU time of other processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def name_of(pid: int) -> str:
    """What the process is in a fleet: ingress, placement, worker, nats-server. A forked one has its command as a title:
    with spaces between."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ").split()
    for part in command:
        if part.startswith("kvfleet."):
            return part.split(".")[1]
    return Path(command[0]).name
