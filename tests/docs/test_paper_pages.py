"""Each table of the papers has a page that shows it under its present title, with the columns that it has now."""

from __future__ import annotations

import pytest

from kvfleet.cli.paper.paper_view import VERDICTS
from kvfleet.cli.paper.paper_work import TABLES
from tests.docs.pages import code_blocks, links, text_of

INDEX = "docs/papers/index.md"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_page(name: str) -> None:
    page, table = f"docs/papers/{name}.md", TABLES[name]
    (shown,) = [block.text for block in code_blocks(page) if block.language == "console"]
    command, title, *lines = shown.splitlines()
    assert command == f"$ kvfleet bench paper {name}"
    assert title == f"{table.name}: {table.title} ({table.source})"
    assert lines[0].split()[-1] == "paper", "what was printed is the last column"
    judged = [line for line in lines if line.startswith(tuple(word for word, _ in VERDICTS.values()))]
    assert judged
    assert not [line for line in judged if line.startswith("not met")], "or the page says why"
    text = text_of(page)
    for part in ("**Printed**", "**Here**", "**Why they differ.**", "**Criteri"):
        assert part in text, part


def test_the_index_and_the_menu_have_every_page() -> None:
    linked = {target for target, _ in links(INDEX)}
    menu = text_of("mkdocs.yml")
    for name in TABLES:
        assert f"{name}.md" in linked
        assert f"papers/{name}.md" in menu
