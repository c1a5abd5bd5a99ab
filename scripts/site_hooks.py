"""Hooks of mkdocs: the site has the pages of the repository outside of docs/ too, and links lead there.

A link of a page to a file that is no page of the site becomes the file's path; where there is no such file it stays as
it is, and mkdocs says so. Pages of docs/contributing stand in the menu without being named in mkdocs.yml.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
ELSEWHERE = "repository/"  # where the site has what is not in docs/
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/helm/kvfleet/README.md",
    "deploy/k8s/README.md",
    "deploy/nats/README.md",
    "deploy/terraform/gke/README.md",
    "examples/README.md",
    "libs/kvcpu/README.md",
    "tests/dst/README.md",
)
MENU = "Contribute"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\(\s*(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\s*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    found = sorted(path.relative_to(ROOT / DOCS).as_posix() for path in (ROOT / DOCS / "contributing").rglob("*.md"))
    for entry in config.nav or []:
        if MENU in entry:
            entry[MENU] += found
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in PAGES:
        files.append(File.generated(config, ELSEWHERE + path, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them."""
    source = page.file.src_uri
    path = source.removeprefix(ELSEWHERE) if source.startswith(ELSEWHERE) else DOCS + source

    def written(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if "://" in target or target.startswith(("/", "mailto:")):
            return link[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if wanted.startswith(DOCS):
            there = wanted.removeprefix(DOCS)
        elif wanted in PAGES:
            there = ELSEWHERE + wanted
        elif (ROOT / wanted).exists():
            return f"`{wanted}`"
        else:
            return link[0]
        return f"[{link['text']}]({posixpath.relpath(there, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(written, markdown)
