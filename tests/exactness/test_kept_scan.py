"""What transformers finds out about itself at each import is kept, and found anew when any of its files changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvfleet.worker.model import quick_imports

STARTED = "from kvfleet.worker.model.quick_imports import keep_scan; keep_scan(); "
NAMES = (
    "import transformers; print(sorted(dir(transformers)), sorted(dir(transformers.models)), transformers.LlamaConfig)"
)


class Module:
    """As `transformers.utils.import_utils`."""

    def __init__(self) -> None:
        self.scans = 0
        setattr(self, quick_imports.SCAN, self.scan)

    def scan(self, path: str) -> dict[object, object]:
        self.scans += 1
        folder = path if Path(path).is_dir() else str(Path(path).parent)
        return {frozenset(): {name: {"A"} for name, _, _ in sorted(quick_imports._files(folder))}}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quick_imports, "kept_in", lambda: tmp_path / "kept")
    for number in range(quick_imports.LEAST_FILES):
        (tmp_path / "models" / f"m{number}").mkdir(parents=True)
        (tmp_path / "models" / f"m{number}" / "modeling.py").write_text("")
    return tmp_path / "models"


def test_it_is_found_out_once(models: Path) -> None:
    module = Module()
    found = module.scan(str(models))
    for _ in range(3):
        assert quick_imports._kept(module, module.scan, str(models)) == found  # type: ignore[arg-type]
    assert quick_imports._kept(module, module.scan, str(models / "m1" / "modeling.py")) != found, "a model's own folder"  # type: ignore[arg-type]
    assert module.scans == 3


def test_a_file_that_is_new_or_other_counts(models: Path) -> None:
    module = Module()
    for number, text in enumerate(("", "__all__ = []", "x = 1")):
        (models / "m1" / "modeling.py").write_text(text)
        assert quick_imports._kept(module, module.scan, str(models)) == module.scan(str(models))  # type: ignore[arg-type]
        assert module.scans == 2 * number + 2


def test_what_is_kept_and_damaged_is_found_out_again(models: Path) -> None:
    module = Module()
    found = quick_imports._kept(module, module.scan, str(models))  # type: ignore[arg-type]
    (kept,) = (models.parent / "kept").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert quick_imports._kept(module, module.scan, str(models)) == found  # type: ignore[arg-type]
    assert module.scans == 2


def test_transformers_is_the_same() -> None:
    plain, kept, again = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
        for code in (NAMES, STARTED + NAMES, STARTED + NAMES)
    )
    assert plain == kept == again
    assert "LlamaForCausalLM" in plain
