"""A container's health check, as images have no curl: `python -m kvservice.health` exits 0 if /readyz answers 200.

The port is that of metrics (`KVFLEET_METRICS_PORT`), else that of HTTP (`KVFLEET_PORT`); `--port` and `--path` win.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Mapping, Sequence

TIMEOUT_S = 3.0
INGRESS_PORT = 8080


def status_of(port: int, path: str, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> int | None:
    """None if no answer comes in time."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def port_of(environment: Mapping[str, str]) -> int:
    said = environment.get("KVFLEET_METRICS_PORT") or environment.get("KVFLEET_PORT")
    return int(said) if said else INGRESS_PORT


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    flags = argparse.ArgumentParser("python -m kvservice.health", allow_abbrev=False)
    flags.add_argument("--port", type=int)
    flags.add_argument("--path", default="/readyz")
    asked = flags.parse_args(argv)
    port = asked.port or port_of(os.environ if environment is None else environment)
    status = status_of(port, asked.path)
    if status != 200:
        sys.stderr.write(f"port {port}{asked.path}: {status or 'no answer'}\n")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
