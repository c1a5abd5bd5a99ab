"""A vault's store behind a listener, as a process that can be killed: prints its address, and ends with its stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.server import DataPlaneServer
from tests.integration.worker_tiers.rig import KEYS


def main() -> None:
    socket, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    server = DataPlaneServer(VaultStore(megabytes * 2**20), KEYS, "v1", unix_path=socket)
    server.start()
    print(*server.addresses, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
