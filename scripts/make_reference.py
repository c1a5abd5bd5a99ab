"""Writes the pages of docs/reference, each from the code that it describes.

python -m scripts.make_reference            after a change of what they describe; then commit what it wrote
python -m scripts.make_reference --check    1 if it would write anything
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference import cli_page, client_page, http_page, settings_page, wire_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES = {
    "http.md": http_page.page,
    "cli.md": cli_page.page,
    "settings.md": settings_page.page,
    "wire.md": wire_page.page,
    "client.md": client_page.page,
}


def stale() -> dict[str, str]:
    """The pages that differ from what the code says, by name, as they should be."""
    made = {name: page() for name, page in PAGES.items()}
    return {name: text for name, text in made.items() if not is_written(name, text)}


def is_written(name: str, text: str) -> bool:
    path = FOLDER / name
    return path.exists() and path.read_text() == text


def main() -> int:
    check = "--check" in sys.argv[1:]
    found = stale()
    for name, text in found.items():
        sys.stderr.write(f"{'stale' if check else 'wrote'} {FOLDER / name}\n")
        if not check:
            (FOLDER / name).write_text(text)
    return 1 if found and check else 0


if __name__ == "__main__":
    sys.exit(main())
