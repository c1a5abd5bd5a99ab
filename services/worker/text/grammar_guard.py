"""Loop: whether a grammar may be compiled here: it was, in a process that has limits (`kvsampling.grammar_check`).

What explodes there is refused, and ends that process alone. One is tried at a time, and no tenant has two in the queue;
answers are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar
from kvsampling.grammar import KEPT, Grammars
from kvsampling.grammar_check import MOST_S

TOO_MUCH = f"takes more than {MOST_S:g} s to compile, or too much memory"


@dataclass(eq=False)
class GrammarGuard:
    """Of the event loop; `stop` may be called from any thread."""

    grammars: Grammars
    _faults: OrderedDict[Grammar, str] = field(default_factory=OrderedDict)  # "" of those that are well
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)  # by tenant
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar-guard"))
    _process: subprocess.Popen[bytes] | None = None  # the thread's

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Raises InvalidRequest that says why it is refused."""
        fault = self._faults.get(grammar)
        if fault is None:
            async with self._turns.setdefault(tenant, asyncio.Lock()):
                fault = self._faults.get(grammar)
                if fault is None:
                    fault = await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
        self._faults[grammar] = fault
        self._faults.move_to_end(grammar)
        if len(self._faults) > KEPT:
            self._faults.popitem(last=False)
        if fault:
            raise InvalidRequest(fault, field=grammar.said)

    def stop(self) -> None:
        self._kill()  # so that the thread does not wait for it
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _try(self, grammar: Grammar) -> str:
        try:
            if (process := self._process) is None:
                process = self._process = subprocess.Popen(
                    (sys.executable, "-m", "kvsampling.grammar_check"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                if fault := _ask(process, self.grammars.to_json()):
                    return fault
            return _ask(process, json.dumps((grammar.form.value, grammar.text)))
        except (OSError, ValueError):  # it has ended
            self._end()
            return TOO_MUCH

    def _kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()

    def _end(self) -> None:
        self._kill()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError), process:  # a pipe without a reader cannot be flushed
                pass


def _ask(process: subprocess.Popen[bytes], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
    return str(json.loads(process.stdout.readline()))
