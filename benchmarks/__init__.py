"""Benchmarks, in rooms by what they measure: `python -m benchmarks.<name>` runs one, whichever its room is.

A module has one import name, that of its file (`benchmarks.engine.prefill`). The short name is for `-m` alone: the
rooms are on this package's path so that Python finds it there, and tests/unit/benchmarks/test_rooms.py holds that no
code says it. A file with an underscore is no benchmark but a part of one; parts of several rooms are in `harness`.
"""

from pathlib import Path

__path__ += [str(room.parent) for room in sorted(Path(__file__).parent.glob("*/__init__.py"))]
