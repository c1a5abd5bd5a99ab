"""The simulation, in a process that does nothing else.

    python -m tests.dst run --seeds 100 --first 1     # seeds of the fleet
    python -m tests.dst run --mutation NAME           # with a line of the product changed
    python -m tests.dst find [NAME ...]               # a seed for each mutation
    python -m tests.dst web                           # the trial of HTTP
    python -m tests.dst guard                         # what is real below it
    python -m tests.dst alike [NAME ...]              # what the simulated nats-server does

The order of sets of texts hangs on a seed of Python's own, which is set first.
"""

from __future__ import annotations

import os
import sys
import traceback

HASHES = "PYTHONHASHSEED"


def main() -> int:
    from tests.dst import mutate, sockets, threads

    threads.install()
    sockets.install()
    if "--mutation" in sys.argv:
        mutate.install(sys.argv[sys.argv.index("--mutation") + 1])
    from tests.dst import alike, files, guard, run, web_trial  # and the product

    files.install()
    if sys.argv[1] == "guard":
        return guard.main()
    return {"alike": alike.main, "run": run.main, "web": web_trial.main}[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    if sys.argv[1] == "find":  # in processes of their own
        from tests.dst import find

        sys.exit(find.main(sys.argv[2:]))
    if os.environ.get(HASHES) != "0":
        os.execve(sys.executable, [sys.executable, "-m", "tests.dst", *sys.argv[1:]], {**os.environ, HASHES: "0"})
    status = 1
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - told: threads that the simulation has left would be waited for
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
