"""Which room stands on which: the table that the import law holds, and the picture of it in CONTRIBUTING.md.

python -m tests.unit.floors       draws the picture anew
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

# Of each package its floors, from the ground up. A room is a folder, or a file beside the folders; it imports rooms of
# lower floors alone. What is not named stands above all.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kvfleet.ingress": (
        ("requests",), ("limits", "prompts"), ("settings",), ("runs",), ("http",), ("answers", "telemetry"),
        ("auth", "sessions"), ("parts",), ("fleet", "request_reader"), ("dashboard", "run_opener"),
        ("batch_flow",), ("request_flow",), ("responses",), ("batches",),
    ),
    "kvfleet.placement": (
        ("index",), ("events", "workers"), ("advice", "policies"), ("config", "record"),
        ("decide", "settings"), ("producers",), ("core",), ("io", "simulate"),
    ),
    "kvfleet.worker": (
        ("eviction", "settings", "text"), ("blocks",), ("port",), ("schedule",), ("model",), ("tiers",), ("engine",),
        ("network", "streams", "vllm"), ("serve",),
    ),
    "kvfleet.vault": (("settings", "store"), ("disk",)),
    "kvfleet.cli": (
        ("console",), ("clients", "operator", "secrets"), ("bench", "embedded"), ("paper", "planning"),
    ),
    "kvcpu": (("vector",), ("blocks", "codec", "sampling"), ("attention", "layers")),
    "kvgpu": (("triton_language",), ("attention", "sampling")),
}  # fmt: skip

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BEGIN, END = "<!-- floors -->\n", "<!-- end of floors -->\n"
ABOVE = {
    "kvfleet.ingress": ("main app ingress",),
    "kvfleet.placement": ("main loop", "placement_metrics"),
    "kvfleet.worker": ("main", "own_backend own_metrics", "vllm_backend vllm_metrics", "backend worker_metrics"),
    "kvfleet.vault": ("main loop", "vault_metrics"),
    "kvfleet.cli": ("main commands",),
    "kvcpu": (),
    "kvgpu": (),
}


def picture() -> str:
    """Each package a column, its rooms from the top down."""
    columns = []
    for package, floors in FLOORS.items():
        rows = [f"{one}" for one in ABOVE[package]] + [" ".join(rooms) for rooms in reversed(floors)]
        name = package.removeprefix("kvfleet.")
        width = max(map(len, (*rows, name)))
        columns.append([name.ljust(width), "-" * width, *(row.ljust(width) for row in rows)])
    empty = [" " * len(column[0]) for column in columns]
    lines = []
    for row in zip_longest(*columns):
        lines.append("   ".join(cell or blank for cell, blank in zip(row, empty, strict=True)).rstrip())
    return "```\n" + "\n".join(lines) + "\n```\n"


def drawn(page: str) -> str:
    """The page with today's picture."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + picture() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
