"""A vault for benchmarks: the real store behind the real data plane, in a process of its own, without NATS.

python -m benchmarks.tiers._vault KEY_HEX MAX_BYTES      prints its addresses, then serves until its stdin ends
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from kvfleet.vault.store.store import VaultStore
from kvproto.dataplane.keys import KeyRing
from kvproto.dataplane.server import DataPlaneServer

KEY_ID = "bench"


class Vault:
    """Use with `with`. `addresses` are its Unix socket and its TCP port."""

    def __init__(self, max_bytes: int, name: str = "v0") -> None:
        self.name = name
        self.secret = secrets.token_bytes(32)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tiers._vault", self.secret.hex(), str(max_bytes), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.addresses = tuple(self._process.stdout.readline().split())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def keyring(self) -> KeyRing:
        return KeyRing({KEY_ID: self.secret})

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    secret, max_bytes, name = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="kvfb-") as folder:
        ring = KeyRing({KEY_ID: bytes.fromhex(secret)})
        path = Path(folder) / "v.sock"
        server = DataPlaneServer(VaultStore(int(max_bytes)), ring, name, tcp=("127.0.0.1", 0), unix_path=path)
        server.start()
        print(*server.addresses, flush=True)
        sys.stdin.read()
        server.close()


if __name__ == "__main__":
    main()
