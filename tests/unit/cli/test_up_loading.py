"""What `kvfleet up` shows while it loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from kvfleet.cli.embedded.loading import LINE_EVERY_S, Lines, Row, share_loaded, table, words
from kvproto.messages import Loading, MemberRecord, Role, State, WorkerRecord

GIB = 2**30
WORKER = WorkerRecord("w0", "e", "l", State.STARTING, "demo", "h", "h", 1, (1, 1))
VAULT = MemberRecord("v0", "e", "l", State.READY, Role.VAULT, "h", 1, (1, 1))


@pytest.mark.parametrize(
    ("loading", "said", "share"),
    [
        (None, "starting", None),
        (Loading("importing torch"), "importing torch", None),
        (Loading("loading weights", 3 * GIB, 15 * GIB), "loading weights, 3.0 GiB of 15.0 GiB", 0.2),
        (Loading("loading weights", 3 * GIB), "loading weights, 3.0 GiB", None),
        (Loading("loading weights", 3, 2), "loading weights, 3 B of 2 B", 1.0),
        (Loading("trying the model", kernels=1), "trying the model, 1 kernel compiled", None),
        (Loading("trying the model", kernels=12), "trying the model, 12 kernels compiled", None),
    ],
)
def test_what_a_process_does_in_words(loading: Loading | None, said: str, share: float | None) -> None:
    record = replace(WORKER, loading=loading)
    assert (words(record), share_loaded(record)) == (said, share)


def test_processes_that_do_not_tell_more_than_their_state() -> None:
    assert [words(one) for one in (None, VAULT, replace(WORKER, state=State.READY))] == ["starting", "ready", "ready"]
    assert share_loaded(VAULT) is None


def test_lines_come_for_changes_and_seldom_for_one_worker() -> None:
    lines = Lines(100.0)
    assert lines.due(100.0, 0, 2, {"w0": "importing torch"}) == ["loading: 0 of 2 workers ready"]
    assert lines.due(101.0, 0, 2, {"w0": "loading weights"}) == []  # most fleets are ready by then
    now = 100.0 + LINE_EVERY_S
    assert lines.due(now, 0, 2, {"w0": "1 of 9", "w1": "2 of 9"}) == ["w0: 1 of 9", "w1: 2 of 9"]
    assert lines.due(now + 0.1, 0, 2, {"w0": "2 of 9", "w1": "2 of 9"}) == []
    now += LINE_EVERY_S
    assert lines.due(now, 1, 2, {"w0": "5 of 9", "w1": "2 of 9"}) == ["w0: 5 of 9", "loading: 1 of 2 workers ready"]


def shown(rows: list[Row], most: int) -> list[str]:
    console = Console(width=80, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table(rows, 12.3, most))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_of_many_processes_fits_a_screen_and_shows_those_that_are_not_ready() -> None:
    rows: list[Row] = [(f"w{i}", "ready" if i % 2 else "loading weights", None if i % 2 else i / 40) for i in range(40)]
    lines = shown(rows, 10)
    assert len(lines) == 11
    assert all("loading weights" in line for line in lines[:9])
    assert "20 ready, 20 not" in lines[9]
    assert "12 s" in lines[10]
    few = shown(rows[:3], 10)
    assert [line.split()[0] for line in few[:3]] == ["w0", "w1", "w2"]
