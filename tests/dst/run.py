"""Runs seeds of the simulated fleet, and says which broke a promise."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import logging
import resource
import sys

from tests.chaos import mutations
from tests.dst.trial import WHOLE_S, learn, run


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--mutation", help="of tests.chaos.mutations: what is switched off, until a seed shows it")
    parser.add_argument("--log", default="CRITICAL", help="of the product, from this level on")
    parser.add_argument("--tell", action="store_true", help="what happened, of each")
    said = parser.parse_args(arguments)
    logging.basicConfig(level=said.log, stream=sys.stderr, format="%(created).4f %(name)s %(message)s")
    sys.unraisablehook = lambda _: None  # last words of coroutines whose run is over
    answers, bad, began = learn(), 0, _cpu_s()
    gc.disable()  # what it frees would come to an end at other moments
    gc.freeze()
    mutation = getattr(mutations, said.mutation) if said.mutation else contextlib.nullcontext
    for seed in range(said.first, said.first + said.seeds):
        with mutation():
            found = run(seed, answers)
            if found.wrong and not said.mutation:
                found = run(seed, answers, traces=True)
        whole = hashlib.sha256(repr((found.lines, found.wrong)).encode()).hexdigest()[:16]
        print(f"{seed} {whole} {len(found.faults)} faults, {found.counts.get('resumed', 0)} resumed", flush=True)
        if said.tell or found.wrong:
            print("\n".join(f"    {line[:400]}" for line in found.lines))
        for wrong in found.wrong:
            print(f"  WRONG {wrong[:400]}")
        bad += bool(found.wrong)
        if bad and said.mutation:
            break
        del found
        gc.collect()
    took = _cpu_s() - began
    hours = said.seeds * WHOLE_S / 3600 / (took / 60)
    print(f"{said.seeds} seeds, {bad} broke a promise; {said.seeds / took:.2f} a second, {hours:.1f} hours a minute")
    return int(bad > 0)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
