"""Other engines, measured beside ours: each is a process of its own interpreter, asked and answering in JSON lines.

Owns both ends of that conversation. This end is `Peer`; the other end is `serve`, in the programs
`benchmarks/peers/_peer_*.py`, which hold one engine each and know nothing of benchmarks. Standard library only: the
peers' interpreters import it.

    with Peer("vllm", folder, "float32") as peer:
        peer.pause()                            # while another engine runs
        ...
        peer.resume()
        answer = peer.ask({"do": "generate", "prompts": prompts, "max_tokens": 64})

| command | answer |
| --- | --- |
| (none: the first line) | `ready`: seconds to import, load and warm up; `engine`: name and version |
| `{"do": "generate", "prompts": [[ids]], "max_tokens"}` | `seconds`, `tokens` `[[ids]]`, `ttft_s` of each prompt |
| `{"do": "generate_plain", ...}` (transformers only) | the same, from `generate` with a DynamicCache |
| `{"do": "ttft", "prompt": [ids]}` | `seconds` to the first token, `tokens`; a known prefix is used if the engine can |
| `{"do": "prefill", "prompt": [ids]}` | the same of a prompt the engine has never seen: the asker's promise |

All prompts are submitted at once and decoded greedily past any end token; time runs from submission in the peer's own
process, so pipes and JSON are not in it. In place of an answer, `{"error": ...}`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

Name = Literal["vllm", "llamacpp", "transformers", "dynamo", "mooncake"]
ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_WARM_UP = [list(range(1, 40)), list(range(2, 60))]


class PeerAbsent(Exception):
    """The peer is not installed here."""


class PeerFailed(Exception):
    """The peer died or answered with an error; its last words."""


NOT_OURS = (PeerAbsent, PeerFailed)  # the comparison is skipped, not failed


class Peer:
    """A running peer. A context manager; owns the process and all its descendants."""

    def __init__(
        self,
        name: Name,
        folder: Path,
        dtype: str,
        *,
        threads: int = 2,
        sequences: int = 16,
        context: int = 0,
        timeout_s: float = 900,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Start `name` on a model folder of `_engine_models` and wait until it is ready.

        `sequences`: how many at most run at once; `context`: their longest, 0 for the model's. `options` are further
        flags of the program. Raises PeerAbsent, PeerFailed.
        """
        self.name = name
        python = interpreter(name)
        flags = {"model": str(folder), "dtype": dtype, "threads": str(threads), "sequences": str(sequences)}
        flags |= {"context": str(context), **(options or {})}
        self._log = tempfile.TemporaryFile(mode="w+", prefix=f"peer-{name}-")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers._peer_{name}", *(f"--{flag}={value}" for flag, value in flags.items())],
            cwd=ROOT,
            env=os.environ | _environment(name, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # its descendants can be told by their session
        )
        try:
            hello = self._answer(timeout_s)
        except BaseException:
            self.close()
            raise
        self.ready_s = float(hello["ready"])
        self.engine = str(hello["engine"])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: Mapping[str, Any], timeout_s: float = 900) -> dict[str, Any]:
        """One command, its answer. Raises PeerFailed, also when paused: it could not answer."""
        if any(state == "T" for _, state in self._members()):
            raise PeerFailed(f"{self.name} is paused")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"{self.name} ended:\n{self._last_words()}") from None
        return self._answer(timeout_s)

    def pause(self) -> None:
        """Stop the whole tree: idle engines spin, and take the cores from the one that is measured."""
        self._signal_until(signal.SIGSTOP, lambda state: state in "TZX")

    def resume(self) -> None:
        """Let the tree go on."""
        self._signal_until(signal.SIGCONT, lambda state: state != "T")

    def close(self) -> None:
        """End the whole tree, waiting for it. May be called again."""
        if not self._log.closed:
            self.resume()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.close()  # the program's loop ends with its input
                self._process.wait(10)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                pass
            self._kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _kill(self) -> None:
        for pid, _ in self._members():
            _send(pid, signal.SIGKILL)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._kill)  # the line then ends
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise PeerFailed(f"{self.name} ended:\n{self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off
            raise PeerFailed(f"{self.name} ended:\n{self._last_words()}") from None
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2_000:]

    def _signal_until(self, number: signal.Signals, reached: Callable[[str], bool]) -> None:
        """Repeat until all are there: one that was being forked meanwhile was not in the first list."""
        for _ in range(1_000):
            behind = [pid for pid, state in self._members() if state not in "ZX" and not reached(state)]
            if not behind:
                return
            for pid in behind:
                _send(pid, number)
            time.sleep(0.001)
        raise PeerFailed(f"{self.name} does not obey {number.name}")

    def _members(self) -> list[tuple[int, str]]:
        """Process ids and states of the peer, its descendants and those of its session."""
        table = dict(_processes())
        top = self._process.pid

        def descends(pid: int) -> bool:
            while pid in table:
                if pid == top or table[pid].session == top:
                    return True
                pid = table[pid].parent
            return False

        return [(pid, row.state) for pid, row in table.items() if descends(pid)]


def interpreter(name: Name) -> str:
    """The Python that has the peer: transformers is in ours, the others have a folder under KVFLEET_PEERS_DIR."""
    if name == "transformers":
        return sys.executable
    python = Path(os.environ.get("KVFLEET_PEERS_DIR") or "/opt/kvfleet-peers") / name / "bin" / "python"
    if not python.exists():
        raise PeerAbsent(f"{name} is not installed: no {python}")
    return str(python)


def _environment(name: Name, threads: int) -> dict[str, str]:
    """What must be set before the process begins: thread counts and preloaded libraries."""
    made = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        # As vLLM's installation page for CPUs has it: threads pinned, Intel's OpenMP and tcmalloc where they are there.
        cores = sorted(os.sched_getaffinity(0))[:threads]
        library = Path(interpreter(name)).parent.parent / "lib"
        preloaded = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *library.glob("libiomp5.so")]
        made |= {
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
    return made


# The other end.


@dataclass(slots=True)
class Run:
    """What became of prompts submitted at once. Times are of `time.perf_counter`."""

    tokens: list[list[int]]
    first_at: list[float]
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @classmethod
    def begin(cls, prompts: list[list[int]]) -> Run:
        """Submission is now."""
        return cls([[] for _ in prompts], [0.0] * len(prompts))

    def add(self, prompt: int, tokens: list[int]) -> None:
        """The prompt got further tokens just now."""
        now = time.perf_counter()
        if tokens and not self.tokens[prompt]:
            self.first_at[prompt] = now
        self.tokens[prompt] += tokens
        self.ended = now

    def answer(self) -> dict[str, Any]:
        return {
            "seconds": self.ended - self.began,
            "tokens": self.tokens,
            "ttft_s": [at - self.began for at in self.first_at],
        }


class Engine(Protocol):
    """An engine as its program wraps it."""

    name: str

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """Greedily, exactly `max_tokens` for each prompt, all at once."""
        ...


def flags() -> argparse.ArgumentParser:
    """The command line that all peer programs share; a program may add to it."""
    made = argparse.ArgumentParser()
    made.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--sequences", type=int, default=16, help="how many at most run at once")
    made.add_argument("--context", type=int, default=0, help="the longest sequence; 0: what the model can")
    return made


def serve(load: Callable[[argparse.Namespace], Engine], parser: argparse.ArgumentParser) -> None:
    """The main loop of a peer program, until its input ends. `load` imports what it needs: importing takes its time."""
    began = time.perf_counter()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a paused peer could not notice that its asker died
    options = parser.parse_args()
    shape = json.loads((options.model / "config.json").read_text())
    longest = int(shape.get("max_position_embeddings") or shape["n_positions"])
    options.context = min(options.context or longest, longest)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to stderr, not between the answers
    try:
        engine = load(options)
        engine.generate(_WARM_UP, 4)
    except Exception:  # noqa: BLE001 (whatever it is, the asker is told)
        _say(answers, error=traceback.format_exc())
        return
    _say(answers, ready=round(time.perf_counter() - began, 3), engine=engine.name)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _say(answers, **_obey(engine, command))
        except Exception:  # noqa: BLE001 (whatever it is, the asker is told)
            _say(answers, error=traceback.format_exc())


def _obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] in ("ttft", "prefill"):
        return engine.generate([command["prompt"]], 1).answer()
    run: Run = getattr(engine, command["do"])(command["prompts"], command["max_tokens"])
    assert all(len(tokens) == command["max_tokens"] for tokens in run.tokens), "a prompt got too few or many tokens"
    return run.answer()


def _say(stream: IO[str], **fields: Any) -> None:
    stream.write(json.dumps(fields) + "\n")
    stream.flush()


# Processes.


@dataclass(frozen=True, slots=True)
class _Row:
    state: str
    parent: int
    session: int


def _processes() -> Iterator[tuple[int, _Row]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            yield int(entry.name), _Row(fields[0], int(fields[1]), int(fields[3]))


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
