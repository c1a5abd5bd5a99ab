"""For all tests: a real NATS server (container or process), and what runs first and last.

A test that must take a minute of waiting begins in a test marked `first` and is judged in one marked `last`; the rest
of its part runs in between.

`make test` runs four lanes beside each other, since half of the time is waiting. Each takes the next part when it is
done with one, so all end at about the same time.

What takes long and seldom tells anything that the rest does not is left to `make check-all` (`SLOW`), which CI runs
too. Without `--part` everything that is named runs, and tests of examples find new ones each time; with it they are the
same ones, so that a run fails by what was changed and not by chance.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

pytest_plugins = ["kvproto.testing.fixtures"]


STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # nothing is captured yet
    config.addinivalue_line("markers", "first: begins something that takes long, before all other tests")
    config.addinivalue_line("markers", "last: judges it, after all other tests")
    if config.getoption("--part") is not None:
        settings.register_profile(
            "same examples",
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
        )
        settings.load_profile("same examples")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A minute before faulthandler ends the process: which test hangs, and what its asyncio tasks wait for."""

    def tell(*_: object) -> None:
        with open(item.config.stash[STDERR], "w", closefd=False) as stderr:
            print(f"\n{item.nodeid} hangs", file=stderr)
            for task in list(asyncio.tasks._all_tasks):
                task.print_stack(file=stderr)

    before = signal.signal(signal.SIGALRM, tell)
    signal.alarm(240)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the lanes begin: where nothing is compiled yet each would compile placement's kernels for itself."""
    if session.config.getoption("--part") is not None and not hasattr(session.config, "workerinput"):
        command = "from kvfleet.placement.workers.warm_up import warm_up; warm_up()"
        subprocess.run([sys.executable, "-c", command], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("quick", "slow", "vllm", "clients"),
        help="what `make test`, `make check-all`, `make vllm-check` or `make client-check` runs",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("--part")) is not None:
        left_out = [item for item in items if _part(item.nodeid) != part]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    def place(item: pytest.Item) -> tuple[int, int]:
        begins, ends = (item.get_closest_marker(name) is not None for name in ("first", "last"))
        return PARTS.index(part_of(item.nodeid)), ends - begins

    items.sort(key=place)


# Models, codecs, compiled programs, manifests, the demo model's card, the contributing pages and links under TLS have
# failed at their own changes alone; the chaos has found more, rarely; what is broken on purpose there is to be
# seen whenever the checker changes.
SLOW = (
    "tests/chaos/test_chaos_quick.py", "tests/chaos/test_chaos_mutations.py", "tests/dst/test_dst_mutations.py",
    "tests/dst/test_dst_more.py",
    "tests/contributing/", "tests/deploy/",
    "tests/containers/", "tests/exactness/test_against_transformers.py", "tests/exactness/test_codec_quality.py",
    "tests/exactness/test_compiled_entry.py", "tests/exactness/test_demo_promises.py",
    "tests/exactness/test_deferred_compiler.py", "tests/exactness/test_kept_scan.py::test_transformers",
    "tests/e2e/test_autoscale.py", "tests/e2e/test_simulate.py", "tests/e2e/test_bench_paper.py::test_a_long_table",
    "tests/integration/security/test_region_link.py",
    "tests/integration/security/test_nats_mtls.py", "tests/unit/benchmarks/test_policy_moves.py",
    "tests/gpu/test_gpu_check.py", "tests/unit/cli/test_cli_plan.py", "tests/engines/test_engine_schemas.py",
)  # fmt: skip

# Those with real vLLM servers, of three processes each, which leave nothing of two cores to others.
VLLM = (
    "tests/vllm/", "tests/chaos/test_chaos_vllm.py", "tests/e2e/test_up_vllm.py",
    "tests/e2e/test_up_vllm_lora.py", "tests/engines/test_mixed_engines.py", "tests/clients/test_clients_vllm.py",
)  # fmt: skip
VLLM_KIND = "real vllm"  # of the engines that others of a test's parameters are


def _part(nodeid: str) -> str:
    if nodeid.startswith(VLLM) or VLLM_KIND in nodeid:
        return "vllm"
    if nodeid.startswith("tests/clients/"):
        return "clients"
    return "slow" if nodeid.startswith(SLOW) else "quick"


# In the order in which they are taken: what takes longest comes first. What stands in one waits for the others of it.
PARTS = (
    "tests/e2e/", "tests/unit/", "tests/dst/", "tests/vllm/", "tests/integration/nats/", "tests/exactness/",
    "tests/engines/", "tests/integration/placement/", "tests/integration/client/", "tests/integration/ingress/",
    "tests/integration/regions/", "tests/chaos/", "tests/integration/", "tests/",
)  # fmt: skip


def part_of(nodeid: str) -> str:
    return next(part for part in PARTS if nodeid.startswith(part))


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """One part after the other for each process."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)

    def remove_node(self, node: Any) -> Any:
        """The test that it died in, which is not given to the next one too."""
        for tests in self.assigned_work[node].values():
            for test, is_done in tests.items():
                if not is_done:
                    tests[test] = True
                    super().remove_node(node)
                    return test
        return super().remove_node(node)

    def _reschedule(self, node: Any) -> None:
        """A process that takes over one last test waits with it for the next, or the word that it is the last."""
        super()._reschedule(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False
    return Lanes(config, log)
