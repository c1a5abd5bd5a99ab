"""Figures of records, runs as files, and two runs beside each other."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvfleet.cli.bench.bench_figures import BenchTargets, as_json, figures_of, percentile, percentiles
from kvfleet.cli.bench.bench_plot import plot_runs
from kvfleet.cli.bench.bench_view import LivePage, live_page, page
from kvfleet.cli.bench.compare import RunComparison, compare_runs, comparison_page
from kvfleet.cli.bench.request_record import NoSavedRun, RequestRecord, SavedRun, load, parse, save

ABOUT = {
    "url": "http://x", "model": "m", "shape": "chat", "sizes": {}, "seed": 0, "arrival": "closed loop", "limits": {},
}  # fmt: skip
NO_TARGETS = BenchTargets()


def record(session: int = 0, turn: int = 0, ttft_s: float = 0.1, step_s: float = 0.02) -> RequestRecord:
    gaps = (step_s,) * 10
    return RequestRecord(
        session, turn, session * 0.5, 0.0, ttft_s=ttft_s, e2e_s=ttft_s + sum(gaps), gaps_s=gaps, output_tokens=11,
        prompt_tokens=100, cached_tokens=25,
    )  # fmt: skip


def failed(session: int, kind: str = "HTTP 429") -> RequestRecord:
    return RequestRecord(session, 0, 0.0, 0.0, kind, "slow down")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpy_s(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), abs=1e-6)


def test_figures_are_of_what_ended_well_and_errors_are_counted_by_kind() -> None:
    records = [record(0), record(1, ttft_s=0.3), failed(2), failed(3), failed(4, "timeout")]
    found = figures_of(records, 2.0, NO_TARGETS)
    assert (found.requests, found.errors, found.errors_by_kind) == (5, 3, {"HTTP 429": 2, "timeout": 1})
    assert (found.requests_per_s, found.tokens_per_s, found.output_tokens) == (1.0, 11.0, 22)
    assert (found.ttft_s.p50, found.ttft_s.mean) == (pytest.approx(0.2), pytest.approx(0.2))
    assert found.itl_s.p99 == pytest.approx(0.02)
    assert found.cached_share == 0.25
    assert found.goodput is None


def test_a_request_is_good_if_it_meets_every_target_and_an_error_never_is() -> None:
    records = [record(0), record(1, ttft_s=0.3), record(2, step_s=0.05), failed(3)]
    assert figures_of(records, 2.0, BenchTargets(ttft_s=0.2)).goodput == 0.5
    assert figures_of(records, 2.0, BenchTargets(ttft_s=0.2, itl_s=0.03)).goodput == 0.25
    assert figures_of(records, 2.0, BenchTargets(e2e_s=10.0)).goodput == 0.75
    assert figures_of(records, 2.0, BenchTargets(e2e_s=10.0)).goodput_per_s == 1.5


def test_what_no_server_tells_is_none() -> None:
    silent = RequestRecord(0, 0, 0.0, 0.0, ttft_s=0.1, e2e_s=0.1, output_tokens=1)
    found = figures_of([silent], 1.0, NO_TARGETS)
    assert (found.prompt_tokens, found.cached_share, found.tpot_s.p50, found.itl_s.p50) == (None, None, None, None)
    assert as_json(found)["tpot_s"] == {"p50": None, "p90": None, "p99": None, "mean": None}


def test_bundled_tokens_take_their_share_of_a_request_s_time() -> None:
    bundled = RequestRecord(0, 0, 0.0, 0.0, ttft_s=0.1, e2e_s=0.5, gaps_s=(0.2, 0.2), output_tokens=9)
    assert bundled.itl_s == pytest.approx(0.05)


def test_a_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    run = SavedRun(ABOUT, 2.0, (record(0), failed(1)))
    save(tmp_path / "a", run)
    again = load(tmp_path / "a")
    assert (again.records, again.duration_s, again.name) == (run.records, 2.0, "m at http://x")


@pytest.mark.parametrize("text", ["", "x", "7", "{}", '{"format": "kvfleet bench 9", "duration_s": 1}'])
def test_a_file_of_another_kind_is_refused_in_words(text: str) -> None:
    with pytest.raises(NoSavedRun):
        parse(io.StringIO(text))


def test_a_cut_file_is_refused_by_its_line(tmp_path: Path) -> None:
    save(tmp_path / "a", SavedRun(ABOUT, 2.0, (record(0), record(1))))
    (tmp_path / "a").write_text((tmp_path / "a").read_text()[:-20])
    with pytest.raises(NoSavedRun, match="line 3"):
        load(tmp_path / "a")


def runs(change: float, sessions: int = 40, noise: float = 0.05) -> RunComparison:
    """Requests that differ much from one another, and by `change` and little noise from their pair."""
    random = Random(7)
    ours, others = [], []
    for session in range(sessions):
        for turn in range(2):
            ttft_s = random.uniform(0.05, 1.0)
            ours.append(record(session, turn, ttft_s))
            others.append(record(session, turn, ttft_s * (1 + change) * random.uniform(1 - noise, 1 + noise)))
    random.shuffle(others)
    return compare_runs(SavedRun(ABOUT, 9.0, tuple(ours)), SavedRun(ABOUT, 9.0, tuple(others)), NO_TARGETS)


def test_pairs_show_a_difference_that_the_spread_of_requests_would_hide() -> None:
    (mean,) = [one for one in runs(-0.1).figures if (one.time, one.statistic) == ("TTFT", "mean")]
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low < -0.1 < mean.high < -0.07
    assert mean.verdict == "B sooner"
    assert {one.verdict for one in runs(0.3).figures if one.time == "TTFT"} == {"B later"}


def test_no_difference_is_none() -> None:
    assert {one.verdict for one in runs(0.0).figures if (one.time, one.statistic) == ("TTFT", "mean")} == {"unclear"}
    alike = {one.verdict for one in runs(0.0).figures if one.time == "ITL"}
    assert alike == {"unclear"}


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 60 pairs of runs without a difference at most 8 may say that there is one: chance alone makes 3."""
    wrong = 0
    for seed in range(60):
        random = Random(seed)
        sides = [
            SavedRun(ABOUT, 9.0, tuple(record(one, 0, random.lognormvariate(-1, 0.5)) for one in range(30)))
            for _ in range(2)
        ]
        found = compare_runs(sides[0], sides[1], NO_TARGETS, seed)
        (mean,) = [one for one in found.figures if (one.time, one.statistic) == ("TTFT", "mean")]
        wrong += mean.verdict != "unclear"
    assert wrong <= 8


def test_few_sessions_have_no_interval_and_only_pairs_count() -> None:
    assert {one.verdict for one in runs(0.5, sessions=3).figures} == {"too few"}
    a = SavedRun(ABOUT, 1.0, (record(0), record(1)))
    b = SavedRun(ABOUT, 1.0, (record(1), failed(0), record(2)))
    found = compare_runs(a, b, NO_TARGETS)
    assert (found.pairs, found.sessions) == (1, 1)


def test_pages_say_it_and_no_text_of_a_server_moves_the_cursor() -> None:
    text = io.StringIO()
    console = Console(file=text, width=100)
    records = [record(0), failed(1)]
    console.print(page(console, "chat on \x1b[31mx", figures_of(records, 2.0, BenchTargets(ttft_s=1.0)), ["a note"]))
    console.print(live_page(LivePage("chat", 0.5, 3.0, 2, 40.0, records, {"HTTP 429": 1})))
    a, b = SavedRun(ABOUT, 2.0, tuple(records)), SavedRun({**ABOUT, "seed": 1}, 2.0, tuple(records))
    console.print(comparison_page(console, a, b, compare_runs(a, b, NO_TARGETS)))
    told = text.getvalue()
    assert "\x1b" not in told
    for line in ("goodput", "1 HTTP 429", "a note", "1 failed", "cached: 25.0%", "not the same load: seed differ"):
        assert line in told, told


@pytest.mark.parametrize("records", [(), (record(0), record(1, ttft_s=2.0), failed(2)), (failed(0),)])
def test_a_plot_is_svg_of_every_run(records: tuple[RequestRecord, ...]) -> None:
    run = SavedRun({**ABOUT, "model": "a<b"}, 2.0, records)
    root = ElementTree.fromstring(plot_runs([run, run]))
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 8
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 460
            assert 0 <= y <= 240


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]).p50 is None
