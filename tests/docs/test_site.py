"""The site is built as `make docs` builds it: a link or a page that leads nowhere fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "repository/SECURITY.html").exists()
