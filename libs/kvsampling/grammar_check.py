"""Tries grammars in a process of its own, which has limits: `python -m kvsampling.grammar_check`.

The first line of its input is `Grammars.to_json`; each further one is a grammar, as [form, text]. Each line is answered
with one: "" where it is well, else why not. A grammar that takes too much ends the process, which is an answer, too.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from kvproto.errors import KvfleetError
from kvproto.messages import Grammar, GrammarForm
from kvsampling.grammar import Grammars, Matcher

MOST_BYTES = 4 * 1024**3  # of address space, of which threads and a large vocabulary take one
MOST_S = 2.0  # of processor time, which a busy machine does not shorten


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars = Grammars.of_json(sys.stdin.readline())
    _answer(_fault(grammars, Grammar(GrammarForm.JSON_OBJECT)))
    for line in sys.stdin:
        form, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MOST_S)  # nobody handles its signal, which ends compiled code as well
        fault = _fault(grammars, Grammar(GrammarForm(form), text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(fault)


def _fault(grammars: Grammars, grammar: Grammar) -> str:
    try:
        Matcher(grammars, grammar).mask(())
    except KvfleetError as error:
        return str(error)
    return ""


def _answer(fault: str) -> None:
    sys.stdout.write(json.dumps(fault) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
