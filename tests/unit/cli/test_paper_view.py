"""How tables of the papers look, which of them are measured, and what becomes of one that cannot be."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.paper.paper_run import PaperBench, results
from kvfleet.cli.paper.paper_table import Criterion, FleetSpec, PaperTable, TableResult, at_least
from kvfleet.cli.paper.paper_view import cell, heading, summary, table_page
from kvfleet.cli.paper.paper_work import TABLES
from tests.support.bench_command import bench


@dataclass(frozen=True)
class Row:
    name: str
    ttft_s: float
    of: int | None
    paper: str


def judge(rows: Sequence[Row]) -> list[Criterion]:
    return [at_least("seconds", rows[0].ttft_s, 1.0)]


GOOD = PaperTable("good", "what holds", "nowhere", lambda _: [Row("x", 1.5, None, "1.263 s")], judge)


def cannot(_: PaperBench) -> list[Row]:
    raise AnswerFailed("the worker\x1b[2J is gone")


def shown(*results: TableResult) -> str:
    console = Console(file=io.StringIO(), width=200)
    for result in results:
        console.print(*table_page(console, result), sep="\n")
    console.print(summary(results, 12.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_our_figures_stand_beside_the_papers() -> None:
    (good,) = results([GOOD], Path(), lambda _: None, quick=True)
    lines = shown(good).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["name", "ttft", "of", "paper"],
        ["x", "1.5", "s", "-", "1.263", "s"],
    ]
    assert lines[4] == "met      seconds: at least 1: 1.5"
    assert lines[-1] == "1 of 1 tables met their criteria in 12 s"


def test_what_is_not_met_is_told() -> None:
    bad = replace(GOOD, name="bad", measure=lambda _: [Row("x", 0.5, 2, "")])
    found = shown(*results([GOOD, bad], Path(), lambda _: None, quick=True))
    assert "not met  seconds: at least 1: 0.5" in found
    assert found.endswith("1 of 2 tables met their criteria in 12 s; not: bad\n")


def test_a_table_that_cannot_be_measured_stops_no_other() -> None:
    found = list(results([replace(GOOD, measure=cannot), GOOD], Path(), lambda _: None, quick=True))
    assert [(one.error != "", one.is_met) for one in found] == [(True, False), (False, True)]
    assert "not measured: the worker\N{REPLACEMENT CHARACTER}[2J is gone" in shown(*found)
    told = found[0].as_json()
    assert (told["met"], told["rows"], told["criteria"]) == (False, [], [])


def test_a_fleet_that_does_not_start_fails_its_tables_alone(tmp_path: Path) -> None:
    nowhere = FleetSpec(("--model=/nowhere",))
    tables = [replace(GOOD, fleet=nowhere), replace(GOOD, name="other", fleet=nowhere), replace(GOOD, name="alone")]
    found = list(results(tables, tmp_path, lambda _: None, quick=True))
    assert [one.is_met for one in found] == [False, False, True]
    assert [one.error for one in found] == 2 * ["model folder '/nowhere' does not exist"] + [""]


def test_cells_have_the_unit_of_their_field() -> None:
    assert [heading(name) for name in ("ttft_s", "tokens_per_s", "least_snr_db")] == [
        "ttft",
        "tokens/s",
        "least snr dB",
    ]
    cells = [("ttft_s", 0.25), ("tokens_per_s", 1234.5), ("of", 12_345), ("same", True), ("window", None), ("x", 1.234)]
    assert [cell(*one) for one in cells] == ["250 ms", "1,234", "12,345", "yes", "-", "1.23"]


def test_the_list_names_every_table() -> None:
    done = bench("paper", "--list")
    assert (done.returncode, [line.split()[0] for line in done.stdout.splitlines()[1:]]) == (0, list(TABLES))
    told = json.loads(bench("paper", "--list", "--json").stdout)
    assert [one["name"] for one in told] == list(TABLES)


@pytest.mark.parametrize(("flags", "said"), [(("nope",), "no table is named 'nope'"), (("--fast",), "--fast")])
def test_a_wrong_word_is_usage(flags: tuple[str, ...], said: str) -> None:
    done = bench("paper", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_argument_of_bench_stays_a_url() -> None:
    done = bench("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "http://127.0.0.1:1" in done.stderr
    assert "[NAME]" not in bench("--help").stdout
