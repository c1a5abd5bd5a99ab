"""Seeds see what is switched off."""

from __future__ import annotations

import pytest

from tests.dst.test_dst import ran


@pytest.mark.parametrize("mutation", ["without_duplicate_removal", "without_resend"])
def test_it_is_found(mutation: str) -> None:
    done = ran("--seeds", "500", "--mutation", mutation)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout[-3000:]
    assert "WRONG" in done.stdout
