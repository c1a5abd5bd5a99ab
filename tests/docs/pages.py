"""The pages that people read, and what stands in them: links, headings, blocks of code. Reads files alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BESIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/k8s/README.md",
    "deploy/nats/README.md",
    "deploy/terraform/gke/README.md",
    "examples/README.md",
    "libs/kvcpu/README.md",
)
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\[]*\]\(\s*([^)#\s]*)(?:#([^)\s]*))?\s*\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    page: str
    line: int
    language: str
    text: str


def pages() -> list[str]:
    """Paths from the root of the repository."""
    return [*BESIDE, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def code_blocks(page: str) -> Iterator[CodeBlock]:
    text = text_of(page)
    for found in FENCE.finditer(text):
        yield CodeBlock(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def links(page: str) -> Iterator[tuple[str, str]]:
    """Target and anchor of each link and picture that leads to a file; "" for this page, or for no anchor."""
    for found in LINK.finditer(FENCE.sub("", text_of(page))):
        if "://" not in found[1] and not found[1].startswith("mailto:"):
            yield found[1], found[2] or ""


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site and most hosts of repositories make them."""
    return {slug(found[1]) for found in HEADING.finditer(FENCE.sub("", page.read_text()))}


def slug(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
