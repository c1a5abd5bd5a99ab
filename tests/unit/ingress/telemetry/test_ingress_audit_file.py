"""The file of the audit log: it never holds anybody up, follows its name, and says what it lost."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from kvfleet.ingress.telemetry.audit import AuditFile, audit_line
from kvproto.errors import InvalidRequest
from tests.support.waiting import wait_until


def lines_of(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()] if path.exists() else []


def write(log: AuditFile, *numbers: int) -> None:
    for n in numbers:
        log.write(audit_line(0.0, "test", n=n))


def test_lines_in_their_order_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditFile(str(path))
    write(log, *range(2000))
    log.close()
    assert lines_of(path) == list(range(2000))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text().splitlines()[0]) == {"time": "1970-01-01T00:00:00.000Z", "event": "test", "n": 0}
    again = AuditFile(str(path))
    write(again, 5)
    again.close()
    assert lines_of(path)[-2:] == [1999, 5], "appended"
    assert (again.written_total, again.dropped_total) == (1, 0)


def test_a_rotated_file_is_left(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = AuditFile(str(path))
    write(log, 1)
    wait_until(lambda: lines_of(path) == [1])
    path.rename(old)
    write(log, 2)
    wait_until(lambda: lines_of(path) == [2])
    path.unlink()
    write(log, 3)
    wait_until(lambda: lines_of(path) == [3])
    log.close()
    assert lines_of(old) == [1]


def test_a_folder_that_is_away_for_a_while(tmp_path: Path) -> None:
    folder, away = tmp_path / "logs", tmp_path / "away"
    folder.mkdir()
    path = folder / "audit.jsonl"
    log = AuditFile(str(path))
    write(log, 1)
    wait_until(lambda: lines_of(path) == [1])
    folder.rename(away)
    write(log, 2)
    wait_until(lambda: log.dropped_total == 1)
    folder.mkdir()
    write(log, 3)
    wait_until(lambda: log.written_total == 2)
    write(log, 4)
    log.close()
    told, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    assert (told["event"], told["count"]) == ("dropped", 1)
    assert [line["n"] for line in rest] == [3, 4]
    assert lines_of(away / "audit.jsonl") == [1]


def test_whoever_writes_never_waits_and_losses_are_told(tmp_path: Path) -> None:
    """The file is a pipe whose reader does not read: the thread is stuck, the writer is not."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditFile(str(path), capacity=100)
    begin = time.monotonic()
    padding = "x" * 1000
    for n in range(1000):
        log.write(audit_line(0.0, "test", n=n, padding=padding))
    assert time.monotonic() - begin < 4.0, "it would wait for ever"
    wait_until(lambda: log.dropped_total > 100)
    got = bytearray()
    done = threading.Event()

    def drain() -> None:
        while not done.is_set():
            try:
                got.extend(os.read(reader, 65536))
            except BlockingIOError:
                time.sleep(0.005)

    thread = threading.Thread(target=drain)
    thread.start()
    wait_until(lambda: log.written_total + log.dropped_total >= 1000)
    write(log, 5000)
    wait_until(lambda: b'"n":5000' in got)
    done.set()
    thread.join()
    log.close()
    os.close(reader)
    events = [json.loads(line) for line in got.decode().splitlines()]
    told = sum(event["count"] for event in events if event["event"] == "dropped")
    assert told == log.dropped_total
    assert told + sum(event["event"] == "test" for event in events) == 1001


def test_a_disk_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditFile("/dev/full")
    for n in range(3):
        write(log, n)
        wait_until(lambda n=n: log.dropped_total > n)
    log.close()
    assert log.written_total == 0
    assert len(caplog.records) == 1, "said once, not for each line"


def test_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    log = AuditFile("-")
    write(log, 7)
    log.close()
    assert json.loads(capfd.readouterr().err)["n"] == 7


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as error:
        AuditFile(str(tmp_path / "nowhere" / "audit"))
    assert error.value.field == "audit_log"
