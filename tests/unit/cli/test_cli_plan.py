"""`kvfleet plan`: its formulas against known cases, and its answer against the simulator."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.cli.console import out
from kvfleet.cli.planning.plan import _show
from kvfleet.cli.planning.plan_rates import NoRates, of_file, read
from kvfleet.cli.planning.planning import Demand, PlannedWorker, erlang_c, fleet_of, lognormal, plan, ttft_share
from kvfleet.placement.simulate.fleet_shape import FleetShape, Speed
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import make_trace
from kvfleet.placement.workers.warm_up import warm_up
from kvservice.trace_rows import Row

WORKER = PlannedWorker(prefill_tokens_per_s=8000.0, decode_s=0.015, decode_each_s=0.0003)
DEMAND = Demand(requests_per_s=10.0, ttft_s=2.5, input_tokens=3000, output_tokens=100, input_cv=0.5, ttft_share=0.95)


def kvfleet(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvfleet.cli.main", "plan", "demo", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


# ------------------------------------------------------------------ the formulas


def test_erlang_c_of_textbooks() -> None:
    assert erlang_c(1, 0.6) == pytest.approx(0.6)  # M/M/1: whoever finds it busy waits
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def test_one_exponential_server_is_known_exactly() -> None:
    """M/M/1's sojourn is exponential with the rate that is left; here S is lognormal, so its wait alone is compared."""
    rate, service = 0.5, 1.0
    waits = 1 - ttft_share(3.0, rate, 1, service, 1.0, sizes=[1e-9])
    assert waits == pytest.approx(0.5 * math.exp(-(1 - 0.5) * 3.0), rel=1e-6)


def test_lognormal_has_the_mean_and_deviation_asked_for() -> None:
    values = lognormal(2.0, 0.5)
    mean = sum(values) / len(values)
    assert mean == pytest.approx(2.0, rel=0.01)
    assert math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) == pytest.approx(1.0, rel=0.05)
    assert lognormal(2.0, 0.0) == [2.0]


LOADS = st.floats(0.1, 60)


@given(LOADS, LOADS)
@settings(max_examples=20, deadline=None)
def test_more_load_never_needs_fewer(one: float, other: float) -> None:
    less, more = sorted((one, other))
    found = [plan(replace(DEMAND, requests_per_s=rate), WORKER)[0].workers for rate in (less, more)]
    assert found[0] <= found[1]


@given(st.floats(0.1, 40), st.floats(1.7, 10), st.floats(0, 0.9))
@settings(max_examples=20, deadline=None)
def test_the_plan_is_enough_and_one_fewer_is_not(rate: float, ttft_s: float, hit_rate: float) -> None:
    demand = replace(DEMAND, requests_per_s=rate, ttft_s=ttft_s, hit_rate=hit_rate)
    fleet, lacking = plan(demand, WORKER)
    assert fleet.fits(demand, WORKER, None) == ""
    assert fleet.utilisation < 1
    if fleet.workers > 1:
        assert fleet_of(fleet.workers - 1, demand, WORKER).fits(demand, WORKER, None) == lacking != ""


def test_whatever_is_scarce_decides() -> None:
    busy = replace(DEMAND, output_tokens=1000, input_tokens=100, ttft_s=1.0)
    assert plan(busy, replace(WORKER, slots=20))[1] == "slots"
    assert plan(busy, replace(WORKER, kv_tokens=40_000.0))[1] == "KV memory"
    assert plan(busy, WORKER, itl_s=0.0165)[1] == "inter-token latency"


def test_what_no_number_of_workers_can_do_is_said() -> None:
    with pytest.raises(ValueError, match="no number of workers makes one prompt quicker"):
        plan(replace(DEMAND, ttft_s=0.2), WORKER)
    with pytest.raises(ValueError, match="with one sequence alone"):
        plan(DEMAND, WORKER, itl_s=0.001)


# ------------------------------------------------------------------ against the simulator


def simulated(demand: Demand, workers: int, seconds: float = 100.0) -> float:
    """Share of first tokens within the target, with prompts that nobody has cached."""
    chance, rows, at = Random(5), [], 0.0
    sigma = math.sqrt(math.log(1 + demand.input_cv**2))
    while at < seconds:
        at += chance.expovariate(demand.requests_per_s)
        tokens = max(1, round(demand.input_tokens * math.exp(chance.gauss(-sigma * sigma / 2, sigma))))
        rows.append(Row(at, tokens, round(demand.output_tokens), [f"r{len(rows)}"]))
    speed = Speed(WORKER.prefill_tokens_per_s, WORKER.chunk_tokens, WORKER.decode_s, WORKER.decode_each_s, WORKER.slots)
    shape = FleetShape(workers=workers, cache_blocks=1000, replicas=1, speed=speed)
    warm_up()
    outcomes = Simulation(make_trace(rows, 512), shape, "cost").run().outcomes
    later = outcomes[len(outcomes) // 10 :]  # it begins empty
    return sum(one.ttft_s is not None and one.ttft_s <= demand.ttft_s for one in later) / len(later)


def test_the_simulator_holds_the_target_at_the_planned_size_and_not_with_one_fewer() -> None:
    fleet, lacking = plan(DEMAND, WORKER)
    assert lacking == "time to first token"
    assert simulated(DEMAND, fleet.workers) >= DEMAND.ttft_share
    assert simulated(DEMAND, fleet.workers - 1) < DEMAND.ttft_share


# ------------------------------------------------------------------ measured rates


def a_worker(prefill: float, steps: float, model: str = "m", **load: int) -> dict[str, object]:
    rates = {"prefill_tokens_per_s": prefill, "decode_steps_per_s": steps}
    return {"model": model, "blocks": 100, "block_size": 16, "slots": 64, "rates": rates, "load": load}


def test_rates_of_a_fleet() -> None:
    found = read(
        {
            "w0": a_worker(1000.0, 50.0, prompt_tokens_total=100, hit_tokens_total=40),
            "w1": a_worker(3000.0, 50.0, prompt_tokens_total=100),
            "w2": a_worker(0.0, 0.0),  # has done nothing yet
        },
        "there",
    )
    assert found.prefill_tokens_per_s == pytest.approx(1500.0)
    assert found.decode_s == pytest.approx(0.02)
    assert (found.kv_tokens, found.slots, found.hit_rate) == (pytest.approx(1600), 64, 0.2)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"w0": a_worker(5.0, 5.0), "w1": a_worker(5.0, 5.0, "n")}, "workers of m, n: say --model-name"),
        ({"x": 1}, "no rates of workers"),
    ],
)
def test_what_is_missing_is_said(said: dict[str, object], why: str) -> None:
    with pytest.raises(NoRates, match=why.replace("?", r"\?")):
        read(said, "there")


def test_what_is_not_measured_yet_is_left_open() -> None:
    idle = read({"w0": a_worker(0.0, 0.0)}, "there")
    assert (idle.prefill_tokens_per_s, idle.decode_s, idle.slots) == (None, None, 64)
    assert read({"w0": a_worker(5.0, 0.0)}, "there").prefill_tokens_per_s == pytest.approx(5.0)
    assert read({"prefill_tokens_per_s": 5.0}, "there").decode_s is None


def test_of_several_models_the_one_that_is_named_counts() -> None:
    two = {"w0": a_worker(5.0, 5.0), "w1": a_worker(7.0, 5.0, "n")}
    assert read(two, "there", "n").prefill_tokens_per_s == pytest.approx(7.0)


def test_of_several_engines_the_one_that_is_planned_with_counts() -> None:
    own, vllm = a_worker(5.0, 5.0) | {"engine": "own"}, a_worker(70.0, 5.0) | {"engine": "vllm"}
    for engine, rate in (("own", 5.0), ("vllm", 70.0)):
        assert read({"w0": own, "w1": vllm}, "there", engine=engine).prefill_tokens_per_s == pytest.approx(rate)
    assert read({"w1": vllm}, "there").prefill_tokens_per_s == pytest.approx(70.0), "there is no other"


def test_a_file_of_lines_counts_by_its_last(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text('{"a": 1}\n{"prefill_tokens_per_s": 100, "decode_steps_per_s": 20}\n')
    assert of_file(path, None).decode_s == pytest.approx(0.05)
    path.write_text("no")
    with pytest.raises(NoRates, match="no JSON"):
        of_file(path, None)


# ------------------------------------------------------------------ the command


def test_the_command_says_it_all() -> None:
    asked = ["--requests-per-second", "4", "--ttft", "2", "--prefill-tokens-per-s", "4000", "--decode-ms", "10"]
    done = kvfleet(*asked, "--worker-memory", "8GiB", "--price-per-worker-hour", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] == 2
    assert found["one_fewer_lacks"] == "time to first token"
    assert found["kv_bytes_per_token"] == 6 * 2 * 2 * 64 * 4
    assert found["kv_bytes_given"] == pytest.approx(8 * 2**30, rel=0.001)
    assert found["vault_bytes"] == pytest.approx(1800 * 4 * 1200 * found["kv_bytes_per_token"])
    assert found["cost_per_hour"] == 4.0
    assert found["rates_from"] == "given"
    for vaults, said in ((1, ": 1 vault\n"), (2, ": 2 vaults\n")):
        with out.capture() as shown:
            _show(found | {"vaults": vaults}, 30.0)
        assert said in "\n".join(line.rstrip() for line in shown.get().splitlines()) + "\n"


def test_without_rates_it_says_what_to_type() -> None:
    done = kvfleet("--requests-per-second", "4", "--ttft", "2", "--input-tokens", "700")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "kvfleet: how fast a worker is with demo is not known: measure it:"
    assert lines[1:] == [
        "  kvfleet up --model demo --workers 1",
        "  kvfleet generate \"$(yes a | head -n 700 | tr '\\n' ' ')\" --max-tokens 200 --url http://127.0.0.1:8080",
        "  kvfleet plan demo --requests-per-second 4 --ttft 2 --input-tokens 700 --output-tokens 200 "
        "--from-fleet http://127.0.0.1:8080",
        "or say --prefill-tokens-per-s and --decode-ms",
    ]
    vllm = kvfleet("--requests-per-second", "4", "--ttft", "2", "--engine", "vllm").stderr.splitlines()
    assert vllm[1] == "  kvfleet up --engine vllm --model demo --workers 1"
    assert vllm[3].startswith("  kvfleet plan demo --engine vllm --requests-per-second 4 ")


ASKED = ("--requests-per-second", "40", "--ttft", "2", "--prefill-tokens-per-s", "20000", "--decode-ms", "10")


def test_flags_of_vllm_workers_are_enough() -> None:
    done = kvfleet(*ASKED, "--engine", "vllm", "--kv-tokens", "262144", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["worker"]["kv_tokens"] == 262144, "as vLLM logs it"
    flags = found["vllm_flags"]
    assert flags["--max-num-seqs"] >= found["most_sequences_per_worker"]
    assert flags["--kv-cache-memory-bytes"] >= found["kv_bytes_per_worker"]
    for bytes_given, lacks in ((flags["--kv-cache-memory-bytes"], False), (found["kv_bytes_per_worker"] // 2, True)):
        given = int(bytes_given / found["kv_bytes_per_token"])
        again = json.loads(kvfleet(*ASKED, "--engine", "vllm", "--json", f"--kv-tokens={given + 1}").stdout)
        assert (again["workers"] > found["workers"]) == lacks
    with out.capture() as shown:
        _show(found, 30.0)
    assert f"--max-num-seqs {flags['--max-num-seqs']}" in shown.get()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--kv-tokens", "9", "--worker-memory", "8GiB"), "--worker-memory and --kv-tokens: one of them"),
        (("--engine", "vllm", "--kv-dtype", "int8"), "--kv-dtype int8 is the own engine's"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: tuple[str, ...], why: str) -> None:
    done = kvfleet(*ASKED, *flags)
    assert (done.returncode, done.stderr) == (2, f"kvfleet: {why}\n")


def test_what_a_fleet_has_not_measured_may_be_said(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"w0": a_worker(4000.0, 0.0)}))
    asked = ["--requests-per-second", "4", "--ttft", "2", "--rates", str(path)]
    lacking = kvfleet(*asked)
    assert lacking.returncode == 1
    assert f"{path}, 1 workers: decoding is not measured yet: measure it:" in lacking.stderr
    done = kvfleet(*asked, "--decode-ms", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worker"]["decode_s"] == 0.01


def test_rates_that_are_too_low_for_the_wait_are_named() -> None:
    """As they are measured on a machine that does other work beside."""
    asked = ["--requests-per-second", "4", "--ttft", "2", "--decode-ms", "30"]
    done = kvfleet(*asked, "--prefill-tokens-per-s", "100")
    assert done.returncode == 1
    assert "that takes 27.5 s, at 100 prompt tokens/s and 30.0 ms a decode step (as given)" in done.stderr


@pytest.mark.parametrize("option", ["--worker-memory", "--vault-memory"])
def test_a_size_without_a_unit_is_refused(option: str) -> None:
    done = kvfleet("--requests-per-second", "4", "--ttft", "2", option, "8")
    assert done.returncode == 2
    assert done.stderr == f"kvfleet: {option}: '8' would be 8 bytes: say 8GiB, or 8B if that is meant\n"
