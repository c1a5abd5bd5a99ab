"""Adapter: how a service is started as a process: `python -P -m kvservice.launch kvfleet.worker.main FLAGS`.

`-P` keeps the current folder, with its own `kvfleet` or `queue.py` perhaps, off Python's path. Standard library only:
where another package is missing, one line says what to install.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

OUR_PACKAGES = ("kvproto", "kvservice", "kvcpu", "kvfleet")


def command(module: str, *flags: str) -> list[str]:
    """`module` has a `main()`."""
    return [sys.executable, "-P", "-m", "kvservice.launch", module, *flags]


def with_extra(extra: str, start: Callable[[], None]) -> None:
    """Exits with one line if a package of our `extra` is not installed."""
    try:
        start()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OUR_PACKAGES:
            raise
        sys.stderr.write(f'kvfleet: {missing or error} is not installed: pip install "kvfleet[{extra}]"\n')
        sys.exit(1)


def imported(module: str) -> Any:
    """Without garbage collection, which takes a sixth of the time and finds nothing."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def main() -> None:
    module = sys.argv.pop(1)
    service = module.split(".")[1]  # each has an extra of its name
    with_extra(service, lambda: imported(module).main())


if __name__ == "__main__":
    main()
