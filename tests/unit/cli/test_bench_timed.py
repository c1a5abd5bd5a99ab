"""The command against a server whose times are known, and against servers that do wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench_command import COMMAND, bench, bench_json
from tests.support.timed_openai import CACHED, FIRST_S, PROMPT, STEP_S, TimedOpenAI
from tests.support.waiting import LIMIT_S, wait_until

EXACT = ("--shape=oneshot", "--spread=0", "--output-tokens=12", "--no-overhead")


def about(seconds: float) -> object:
    """On a busy machine times get longer."""
    return pytest.approx(seconds + 0.06, abs=0.09)


@pytest.fixture(scope="module")
def server() -> Iterator[TimedOpenAI]:
    with TimedOpenAI() as server:
        yield server


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_figures_are_the_server_s_times(server: TimedOpenAI, endpoint: str) -> None:
    found = bench_json(
        server.url, *EXACT, "--model=timed", "--requests=20", "--concurrency=5", f"--endpoint={endpoint}",
        "--ttft-target=0.45", "--itl-target=0.1",
    )  # fmt: skip
    ttft_s, rest_s = sum(FIRST_S) / len(FIRST_S), 11 * STEP_S
    assert (found["requests"], found["errors"]) == (20, 0)
    assert found["ttft_s"]["mean"] == about(ttft_s)
    assert found["ttft_s"]["p50"] == about(FIRST_S[2])
    assert found["itl_s"]["mean"] == pytest.approx(1.2 * STEP_S, rel=0.3)
    assert found["tpot_s"]["p50"] == pytest.approx(1.2 * STEP_S, rel=0.3)
    assert found["e2e_s"]["mean"] == about(ttft_s + rest_s)
    assert found["tokens_per_s"] == pytest.approx(20 * 12 / found["duration_s"], rel=1e-4)
    assert found["cached_share"] == CACHED / PROMPT
    assert found["goodput"] == pytest.approx(0.6, abs=0.15)  # 0.2, 0.3 and 0.4 of five


def test_bundled_tokens_are_counted_by_usage(server: TimedOpenAI) -> None:
    found = bench_json(server.url, *EXACT, "--model=bundled", "--requests=5")
    assert found["output_tokens"] == 5 * 12
    assert found["itl_s"]["p50"] > 3 * STEP_S  # between events
    # The first event has four tokens, which came with it: eleven share the time of eight.
    assert found["tpot_s"]["p50"] == pytest.approx(1.2 * STEP_S, rel=0.3)


def test_without_usage_tokens_are_events_and_nothing_is_said_of_caches(server: TimedOpenAI) -> None:
    found = bench_json(server.url, *EXACT, "--model=silent-usage", "--requests=5")
    assert (found["output_tokens"], found["prompt_tokens"], found["cached_share"]) == (60, None, None)
    assert "tells no usage" in bench(server.url, *EXACT, "--model=silent-usage", "--requests=1").stdout


def test_a_server_that_refuses_a_field_is_asked_without_it(server: TimedOpenAI) -> None:
    assert bench_json(server.url, *EXACT, "--model=strict", "--requests=3")["errors"] == 0
    assert not any("ignore_eos" in body for body in server.bodies("strict"))
    assert all(body["stream_options"] == {"include_usage": True} for body in server.bodies("strict"))


@pytest.mark.parametrize(
    ("model", "kind", "told"),
    [
        ("busy", "HTTP 429", "slow down"),
        ("cut", "broken stream", "closed the connection"),
        ("failing", "error in the stream", "out of memory"),
        ("hanging", "timeout", "TimeoutError"),
        ("garbled", "no event of OpenAI's form", "no JSON"),
        ("empty", "empty answer", "no text"),
    ],
)
def test_errors_have_kinds(server: TimedOpenAI, tmp_path: Path, model: str, kind: str, told: str) -> None:
    flags = (server.url, *EXACT, f"--model={model}", "--requests=3", "--timeout=1.5", f"--output={tmp_path / 'run'}")
    done = bench(*flags)
    assert done.returncode == 1, "every request failed"
    assert f"3 {kind}" in done.stdout
    assert told in done.stdout
    assert [json.loads(line)["error"] for line in (tmp_path / "run").read_text().splitlines()[1:]] == [kind] * 3


def test_turns_wait_for_answers_and_say_them_again(server: TimedOpenAI) -> None:
    before = len(server.bodies("timed"))
    bench_json(server.url, "--shape=chat", "--turns=3", "--pause=0", "--output-tokens=4", "--spread=0", "--requests=3",
               "--concurrency=1", "--model=timed", "--no-overhead")  # fmt: skip
    first, second, third = (body["messages"] for body in server.bodies("timed")[before:])
    assert [one["role"] for one in first] == ["system", "user"]
    assert [one["role"] for one in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert (second[:2], third[:4]) == (first, second)
    assert second[2]["content"] == " word" * 4


def test_a_closed_loop_has_so_many_at_once_and_an_open_one_does_not_wait() -> None:
    with TimedOpenAI() as server:
        bench_json(server.url, *EXACT, "--model=timed", "--requests=12", "--concurrency=3")
        assert server.most_at_once == 3
        found = bench_json(server.url, *EXACT, "--model=timed", "--requests=30", "--rate=100")
        assert server.most_at_once > 10
    assert found["late_s"]["p99"] < 0.5
    assert found["ttft_s"]["p50"] == about(FIRST_S[2])


def test_what_a_limit_holds_back_waits_and_its_wait_counts(server: TimedOpenAI) -> None:
    found = bench_json(server.url, *EXACT, "--model=timed", "--requests=10", "--rate=100", "--concurrency=1")
    assert found["late_s"]["p99"] > 1.0
    assert found["ttft_s"]["p99"] > 1.0


def test_a_trace_comes_at_its_times(server: TimedOpenAI, tmp_path: Path) -> None:
    line = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line | {"timestamp": 1000 * at}) + "\n" for at in (7, 8, 9)))
    run = tmp_path / "run"
    flags = (server.url, f"--trace={trace}", "--speed=4", "--model=timed", "--no-overhead", f"--output={run}")
    assert bench_json(*flags)["output_tokens"] == 9
    due = sorted(json.loads(line)["due_s"] for line in run.read_text().splitlines()[1:])
    assert due == pytest.approx([0.0, 0.25, 0.5], abs=0.01)


def test_two_runs_are_compared_and_drawn(server: TimedOpenAI, tmp_path: Path) -> None:
    slower = TimedOpenAI(tuple(one + 0.3 for one in FIRST_S))
    runs = [tmp_path / "a", tmp_path / "b"]
    with slower:
        for url, run in ((server.url, runs[0]), (slower.url, runs[1])):
            flags = ("--model=timed", "--requests=20", "--concurrency=5", f"--output={run}", f"--plot={run}.svg")
            assert bench(url, *EXACT, *flags).returncode == 0
    done = bench("--compare", *map(str, runs), "--json", f"--plot={tmp_path / 'both.svg'}")
    found = json.loads(done.stdout)
    assert found["pairs"] == 20
    (ttft,) = [one for one in found["figures"] if (one["time"], one["statistic"]) == ("TTFT", "mean")]
    assert (ttft["verdict"], ttft["b"] - ttft["a"]) == ("B later", pytest.approx(0.3, abs=0.12))
    assert "B later" in bench("--compare", *map(str, runs)).stdout
    for name in ("a.svg", "both.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_done(server: TimedOpenAI, number: signal.Signals) -> None:
    before = len(server.bodies("timed"))
    flags = [*COMMAND, server.url, *EXACT, "--model=timed", "--duration=60", "--concurrency=2"]
    process = subprocess.Popen(flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(server.bodies("timed")) >= before + 6)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    assert "it was interrupted" in out
    assert "time to first token" in out
    assert "errors                      none" in out


def test_its_own_cost_is_small_and_told(server: TimedOpenAI) -> None:
    """Of a core per 1,000 tokens/s, each token in a packet of its own: docs/bench.md says what a fast one needs, others
    are up to three times slower."""
    found = bench_json(server.url, "--model=timed", "--shape=oneshot", "--requests=1")
    assert 0 < found["client_cpu_on_null_server"] <= 0.15
    assert "on a null server" in bench(server.url, "--model=timed", "--shape=oneshot", "--requests=1").stdout


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "which server?"),
        (["ftp://x"], "no address of a server"),
        (["http://"], "no address of a server"),
        (["http://x:99999"], "99999"),
        (["http://x", "--shape=trace"], "--trace FILE"),
        (["http://x", "--speed=2"], "--trace FILE"),
        (["http://x", "--trace=/nowhere/t"], "No such file"),
        (["http://x", "--trace=/etc/hostname"], "line 1 is no request of a trace"),
        (["http://x", "--trace=t", "--shape=rag"], "not of rag"),
        (["http://x", "--trace=t", "--rate=2"], "a trace says"),
        (["http://x", "--trace=t", "--turns=2"], "a trace says"),
        (["http://x", "--output=/nowhere/run"], "no file that can be written"),
        (["http://x", "--plot=/tmp"], "no file that can be written"),
        (["http://x", "--compare", "a", "b"], "leave the URL out"),
        (["--compare", "/nowhere/a", "/nowhere/b"], "No such file"),
        (["--compare", "/etc/hostname", "/etc/hostname"], "line 1 is not of a run"),
    ],
)
def test_what_cannot_be_meant_is_one_line(flags: list[str], line: str) -> None:
    done = bench(*flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_server_that_is_not_there_or_has_no_such_model_is_one_line(server: TimedOpenAI) -> None:
    for flags, line in (
        (["http://127.0.0.1:1"], "refused"),
        (["http://127.0.0.1:1", "--model=m"], "127.0.0.1"),
        ([server.url, "--model=strict", "--endpoint=chat", "--timeout=0.001"], "no answer within"),
    ):
        done = bench(*flags)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert line in done.stderr.lower()
        assert done.stderr.count("\n") == 1
