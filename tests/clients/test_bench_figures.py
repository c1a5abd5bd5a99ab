"""`kvfleet bench` beside clients that measure too: of the same load on the same server all see the same.

The server's times are known, so a difference is a client's. Each asks as many requests of as many tokens, as many at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.clients.client_scripts import Clients, need_clients
from tests.support.bench_command import bench_json
from tests.support.timed_openai import TimedOpenAI

REQUESTS, OUTPUT, CLIENTS = 20, 20, 5
AGREE = 0.05
FIRST_S = (0.20, 0.22, 0.24, 0.26, 0.28)  # so near that who comes when does not matter to the whole
SAME = {
    "ttft_s": ("mean", "p50", "p90"),
    "itl_s": ("p50",),
    "tpot_s": ("mean", "p50", "p90"),
    "e2e_s": ("mean", "p50", "p90"),
}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Clients]:
    need_clients(pytestconfig)
    told = {"KVFLEET_REQUESTS": str(REQUESTS), "KVFLEET_OUTPUT": str(OUTPUT), "KVFLEET_CONCURRENCY": str(CLIENTS)}
    with TimedOpenAI(FIRST_S) as server:
        yield Clients(server.url, "none", "timed", DEMO_FOLDER, tmp_path_factory.mktemp("figures"), told)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("script", ["vllm_bench_figures", "aiperf_figures"])
def test_figures_agree(peers: Clients, script: str, endpoint: str) -> None:
    peers.passes(script, f"check_{endpoint}")
    result = peers.run(script, Path()).result_of(f"check_{endpoint}")
    assert result is not None
    theirs: dict[str, Any] = result["saw"]
    ours = bench_json(
        peers.base, "--model=timed", "--shape=oneshot", f"--requests={REQUESTS}", f"--concurrency={CLIENTS}",
        f"--output-tokens={OUTPUT}", "--spread=0", f"--endpoint={endpoint}", "--no-overhead",
    )  # fmt: skip
    assert (ours["requests"], ours["errors"]) == (REQUESTS, 0)
    assert ours["tokens_per_s"] == pytest.approx(theirs["tokens_per_s"], rel=AGREE)
    for name in SAME.keys() & theirs.keys():
        for one in SAME[name]:
            assert ours[name][one] == pytest.approx(theirs[name][one], rel=AGREE), (name, one)
