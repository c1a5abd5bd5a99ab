"""One process of a chaos fleet: a service as it is, started with what a test cannot reach from outside. Wiring.

    python -m tests.chaos.member ROLE [--chaos-...=...] [flags of the service]

--chaos-clock=FILE       its wall clock is ahead by the seconds (a double) in this file, from the moment they are there
--chaos-version=N        the release that speaks wire version N, and N-1
--chaos-data-plane=ADDR  others are told to reach its blocks there: a proxy
--chaos-step-s=S         each step of the model takes so much longer: streams that last, without a busy core,
--chaos-token-s=S        and so much more for each token that it is fed: blocks are worth being fetched

An engine of our own balances its books twice a second when idle, instead of every ten.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

OPTION = "--chaos-"


def shift_clock(path: str) -> None:
    """`time.time` alone: what is measured in a process is monotonic, and must not notice."""
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real = time.time

    def shifted() -> float:
        return float(real() + struct.unpack("d", shared[:8])[0])

    time.time = shifted


def speak(version: int) -> None:
    from kvproto import codec

    codec.VERSION, codec.MIN_VERSION = version, max(1, version - 1)


def advertise(address: str) -> None:
    from kvservice import data_plane

    def proxied(addresses: Sequence[str], settings: object) -> tuple[str, ...]:
        return (address,)

    data_plane.reachable = proxied  # type: ignore[assignment]


def slow_down(runner: type[Any], step_s: float, token_s: float) -> None:
    run = runner.run

    def slow_run(self: Any, slices: Sequence[Any]) -> Any:
        time.sleep(step_s + token_s * sum(len(part.ids) for part in slices))
        return run(self, slices)

    runner.run = slow_run


def runner_of(flags: Sequence[str]) -> type[Any]:
    if "--runner=fake" in flags:
        from kvfleet.worker.model.fake import FakeRunner

        return FakeRunner
    from kvfleet.worker.model.runner import TorchRunner

    return TorchRunner


def check_often() -> None:
    from kvfleet.worker.engine import engine_thread

    engine_thread.CHECK_PERIOD_S = 0.5


def main(argv: list[str]) -> None:
    role, *flags = argv
    options = dict(flag.removeprefix(OPTION).split("=", 1) for flag in flags if flag.startswith(OPTION))
    if "clock" in options:
        shift_clock(options["clock"])
    if "version" in options:
        speak(int(options["version"]))
    if "data-plane" in options:
        advertise(options["data-plane"])
    if "step-s" in options:
        slow_down(runner_of(flags), float(options["step-s"]), float(options["token-s"]))
    if role == "worker" and "--engine=vllm" not in flags:
        check_often()
    module = f"kvfleet.{role}.main"
    sys.argv = [module, *(flag for flag in flags if not flag.startswith(OPTION))]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
