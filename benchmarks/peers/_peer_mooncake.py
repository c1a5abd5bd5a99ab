"""Mooncake's transfer engine over TCP, both ends of it: a program of the peer's own interpreter, in JSON lines.

Standard library and the peer only. The target registers its memory and says where it lies; the initiator reads from it
and writes to it, many blocks a call. Started by `data_plane` as two processes; libraries that the wheel links against
and this machine has not (CUDA's and RDMA's, which TCP does not use) may lie in `lib` of its folder.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import mmap
import os
import signal
import sys
import time
from typing import Any

from mooncake.engine import TransferEngine

_PR_SET_PDEATHSIG = 1


class End:
    """One engine with one registered piece of memory."""

    def __init__(self, nbytes: int, fill: bytes) -> None:
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the engine did not start")
        self._memory = mmap.mmap(-1, nbytes)
        for at in range(0, nbytes, len(fill)):
            self._memory[at : at + len(fill)] = fill[: nbytes - at]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if self.engine.register_memory(self.address, nbytes) != 0:
            raise RuntimeError("the memory was not registered")

    def hello(self) -> dict[str, Any]:
        version = importlib.metadata.version("mooncake-transfer-engine")
        return {
            "pid": os.getpid(),
            "segment": f"127.0.0.1:{self.engine.get_rpc_port()}",
            "address": self.address,
            "engine": f"mooncake-transfer-engine {version}, TCP",
        }

    def begins_with(self, at: int, count: int) -> str:
        return self._memory[at : at + count].hex()

    def move(self, verb: str, segment: str, address: int, block: int, distinct: int, count: int) -> dict[str, Any]:
        """`count` blocks of `block` bytes, of `distinct` ones in turn, in one call; seconds it took."""
        offsets = [at % distinct * block for at in range(count)]
        mine, theirs = [self.address + at for at in offsets], [address + at for at in offsets]
        call = getattr(self.engine, f"batch_transfer_sync_{verb}")
        began = time.perf_counter()
        result = call(segment, mine, theirs, [block] * count)
        seconds = time.perf_counter() - began
        if result != 0:
            raise RuntimeError(f"{verb} returned {result}")
        return {"seconds": seconds}


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr, not between the answers
    nbytes, fill = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
    end = End(nbytes, fill)
    answers.write(json.dumps(end.hello()) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "peek":
            answer: dict[str, Any] = {"bytes": end.begins_with(command["at"], 16)}
        else:
            answer = end.move(
                command["do"],
                command["segment"],
                command["address"],
                command["block"],
                command["distinct"],
                command["count"],
            )
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
