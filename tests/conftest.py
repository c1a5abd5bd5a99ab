"""For all tests: a real NATS server (container or process), and what runs first and last.

A test that must take a minute of waiting begins in a test marked `first` and is judged in one marked `last`; the rest
of its part runs in between.

Four lanes run beside each other, since a part of the time is waiting. Each takes the next part when it is
done with one, so all end at about the same time.

`make test` is what one waits for after a change; the rest is left to `make check-all` (`SLOW`), which CI runs too.
Without `--part` everything that is named runs, and tests of examples find new ones each time; with it they are the same
ones, so that a run fails by what was changed and not by chance.

CI has no time for all of it on a slow machine. It begins elsewhere each day (`--turn`), so that what is skipped today
runs on another day.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

pytest_plugins = ["kvproto.testing.fixtures"]


STDERR = pytest.StashKey[int]()
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it lie evenly between whole numbers


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # nothing is captured yet
    config.addinivalue_line("markers", "first: begins something that takes long, before all other tests")
    config.addinivalue_line("markers", "last: judges it, after all other tests")
    if config.getoption("--part") is not None:
        settings.register_profile(
            "same examples",
            derandomize=True,
            max_examples=50,  # where a test does not say it
            suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
        )
        settings.load_profile("same examples")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("--until"):
        pytest.skip("the time is over")


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
    parser.addoption("--until", type=float, default=math.inf, help="when to skip tests: seconds since the epoch")
    parser.addoption("--turn", type=int, default=0, help="a day's number, which says where to begin")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("--part")) is not None:
        left_out = [item for item in items if _part(item.nodeid) != part]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    parts: dict[str, list[Path]] = {part: [] for part in PARTS}
    for item in items:
        if item.path not in (modules := parts[part_of(item.nodeid)]):
            modules.append(item.path)
    begin = config.getoption("--turn") * GOLDEN % 1.0

    def turned(one: Any, of: Sequence[Any]) -> int:
        return (of.index(one) - int(begin * len(of))) % len(of)

    def place(item: pytest.Item) -> tuple[int, int, int]:
        begins, ends = (item.get_closest_marker(name) is not None for name in ("first", "last"))
        part = part_of(item.nodeid)
        return turned(part, PARTS), ends - begins, turned(item.path, parts[part])

    items.sort(key=place)


# Left to `make check-all`: whole fleets of processes, models against transformers, simulated fleets, manifests and GPU
# code, and of the rest what takes longest. Of the fleets those stay that answer HTTP and producers.
SLOW = (
    "tests/chaos/", "tests/containers/", "tests/contributing/", "tests/deploy/", "tests/dst/", "tests/e2e/",
    "tests/examples/", "tests/exactness/", "tests/gpu/", "tests/docs/test_code_blocks.py",
    "tests/fuzz/test_http_fuzz.py",
    "tests/engines/test_engine_continuing.py", "tests/engines/test_engine_grammars.py",
    "tests/engines/test_engine_refusals.py", "tests/engines/test_engine_schemas.py",
    "tests/engines/test_engine_scores.py", "tests/integration/client/test_outage.py",
    "tests/integration/client/test_resume.py::test_penalties", "tests/integration/ingress/test_ingress_background.py",
    "tests/integration/ingress/test_ingress_batches.py", "tests/integration/ingress/test_ingress_durable.py",
    "tests/integration/ingress/test_ingress_explain.py", "tests/integration/ingress/test_ingress_resume.py",
    "tests/integration/ingress/test_ingress_timeline.py", "tests/integration/nats/",
    "tests/integration/placement/test_placement_tiers.py", "tests/integration/regions/",
    "tests/integration/security/", "tests/integration/tracing/", "tests/integration/vault/",
    "tests/integration/worker_tiers/", "tests/integration/worker_vllm/",
    "tests/unit/benchmarks/test_policy_moves.py", "tests/unit/benchmarks/test_rooms.py",
    "tests/unit/cli/test_bench_figures.py", "tests/unit/cli/test_bench_timed.py",
    "tests/unit/cli/test_cli_bare_install.py", "tests/unit/cli/test_cli_other_server.py",
    "tests/unit/cli/test_cli_plan.py", "tests/unit/cli/test_paper_view.py",
    "tests/unit/kvproto/test_hash_ring.py", "tests/unit/kvsampling/test_sampler_ways.py",
    "tests/unit/placement/advice/test_autoscale.py", "tests/unit/placement/index/test_index_changes.py",
    "tests/unit/placement/index/test_prefix_index.py::test_memory", "tests/unit/placement/simulate/",
    "tests/unit/placement/index/test_prefix_index.py::test_whatever_is_forged",
    "tests/unit/placement/test_placement_machine.py", "tests/unit/placement/workers/test_phantom_load.py",
    "tests/unit/worker/blocks/test_block_pool.py::test_pool_equals", "tests/unit/worker/blocks/test_reuse_eviction.py",
    "tests/unit/worker/test_random_", "tests/unit/worker/tiers/test_host_states.py::test_however",
    "tests/unit/worker/tiers/test_tiered_schedules.py",
    "tests/unit/worker/vllm/test_vllm_trouble.py",
)  # fmt: skip
QUICK = ("tests/e2e/test_http", "tests/e2e/test_producer.py")

# Those with real vLLM servers, of three processes each, which leave little of two cores to others.
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
    return "slow" if nodeid.startswith(SLOW) and not nodeid.startswith(QUICK) else "quick"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of this part: each lane would read all of them, which takes a minute."""
    path, part = collection_path.relative_to(config.rootpath).as_posix(), config.getoption("--part")
    path += "" if path.endswith(".py") else "/"
    if part == "quick":
        left_out = _part(path) != part and not any(one.startswith(path) for one in QUICK)
    else:
        left_out = part == "slow" and not any(one.startswith(path) or path.startswith(one) for one in SLOW)
    return left_out or None


# In the order in which they are taken: what takes longest comes first. What stands in one waits for the others of it.
PARTS = (
    "tests/e2e/", "tests/exactness/", "tests/dst/test_dst.py::test_seeds_of_the_day", "tests/dst/", "tests/vllm/",
    "tests/unit/placement/", "tests/unit/worker/", "tests/unit/cli/", "tests/unit/",
    "tests/integration/ingress/", "tests/integration/client/", "tests/engines/", "tests/integration/nats/",
    "tests/integration/placement/", "tests/integration/regions/", "tests/chaos/", "tests/integration/", "tests/",
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
