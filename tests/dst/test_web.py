"""HTTP of the simulated fleet does as HTTP does, and does it again to the bit."""

from __future__ import annotations

from tests.dst.test_dst import ran


def test_requests_over_http_and_again_as_they_were() -> None:
    """In two processes, with their times."""
    first, second = ran("web"), ran("web")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-6000:]
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) > 20
