"""What a study looks like: a table, values for JSON, a picture."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from simulate_build import a_row, a_trace, conversations

from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.picture import styled
from kvfleet.placement.simulate.plot import draw, plot
from kvfleet.placement.simulate.report import as_values, headline, loads_table, seconds, table
from kvfleet.placement.simulate.study import POLICIES, Study, make_study

NUMBER = re.compile(r"-?\d+\.\d+")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def study() -> Study:
    made = make_study(conversations(60), FleetShape(workers=2, cache_blocks=300), load=0.8)
    list(made.run(POLICIES))
    list(made.run_loads(["cost", "ring"], [0.5, 1.0]))
    return made


def texts(study: Study) -> list[str]:
    """Of its picture, which is well formed, stays within its edges, and is the same each time but for the
    noise of the solver that lays it out."""
    picture = plot(study)
    again = plot(study)
    assert NUMBER.split(picture) == NUMBER.split(again)
    assert [float(one) for one in NUMBER.findall(picture)] == pytest.approx(
        [float(one) for one in NUMBER.findall(again)], abs=1e-3
    )
    assert "nan" not in picture
    assert "inf" not in picture
    with styled():
        figure = draw(study)
        figure.draw_without_rendering()
        taken, edges = figure.get_tightbbox(), figure.bbox_inches
    assert edges.x0 <= taken.x0 <= taken.x1 <= edges.x1
    assert edges.y0 <= taken.y0 <= taken.y1 <= edges.y1
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def titles(picture: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def test_a_study_at_a_load_is_at_that_load(study: Study) -> None:
    assert study.load == pytest.approx(0.8)
    with pytest.raises(ValueError, match="come at once"):
        make_study(a_trace(a_row(0, "ab"), a_row(0, "c")), FleetShape(workers=1), load=0.5)


def test_a_table_has_a_row_for_each_policy_and_straight_columns(study: Study) -> None:
    head, *rows = table(study)
    assert [row.split()[0] for row in rows] == list(POLICIES)
    assert rows[0].startswith(f"{DEFAULT_POLICY} (default)")
    assert len({len(line) for line in (head, *rows)}) == 1
    assert "0.80 of capacity" in headline(study)[0]


def test_goodput_has_a_column_for_each_load(study: Study) -> None:
    _, _, head, *rows = loads_table(study)
    assert head.split() == ["policy", "at", "0.5", "at", "1"]
    assert [row.split()[0] for row in rows] == ["cost", "ring"]


def test_churn_is_told_below_the_table() -> None:
    made = make_study(conversations(60), FleetShape(workers=2, cache_blocks=300, churn_s=1.0))
    list(made.run(["cost"]))
    assert table(made)[-1].startswith("sessions moved by each change of the fleet (1/N is 50.0%): cost ")


def test_values_are_json(study: Study) -> None:
    values = json.loads(json.dumps(as_values(study), allow_nan=False))
    assert values["default"] == DEFAULT_POLICY
    assert [one["policy"] for one in values["policies"]] == list(POLICIES)
    for one in values["policies"]:
        assert {"hit_rate", "hit_of_attainable", "ttft_p50_s", "ttft_p99_s", "load_cov"} <= set(one)
        assert 0 <= one["hit_rate"] <= 1
        assert one["ttft_p50_s"] <= one["ttft_p99_s"]
    assert [(one["load"], one["policy"]) for one in values["loads"]] == [
        (0.5, "cost"), (0.5, "ring"), (1.0, "cost"), (1.0, "ring"),
    ]  # fmt: skip


def test_a_picture_says_all_of_it(study: Study) -> None:
    said = texts(study)
    for title in ("Time to first token", "Hits attained of attainable", "Goodput at rising load", "Moved turns"):
        assert title in said
    for policy in POLICIES:
        assert said.count(policy) >= 3  # two legends or bars, and its load
        assert any(text.startswith(f"{policy}, CoV ") for text in said)
        assert any(title.startswith(f"{policy}: p99 ") for title in titles(plot(study)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_of_little(count: int) -> None:
    made = make_study(a_trace(*(a_row(0.0, [n]) for n in range(count))), FleetShape(workers=1, cache_blocks=2))
    list(made.run(["random"]))
    assert "Goodput" in texts(made)


def test_seconds_are_readable() -> None:
    assert [seconds(value) for value in (0.0123, 5.678, 1234.5, math.inf)] == ["12 ms", "5.68 s", "1,234 s", "never"]
