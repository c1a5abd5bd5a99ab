"""What the papers' tables are judged by: good rows meet every criterion, and each criterion can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvfleet.cli.paper.paper_models import GPT2, write_model
from kvfleet.cli.paper.paper_table import PaperTable, TableResult, all_of, at_least, at_most, ratio
from kvfleet.cli.paper.paper_work import TABLES
from kvfleet.cli.paper.tables.batches import SIZES, BatchRow
from kvfleet.cli.paper.tables.burst import BurstRow
from kvfleet.cli.paper.tables.codec_snr import CodecRow
from kvfleet.cli.paper.tables.kv_sizes import SizeRow
from kvfleet.cli.paper.tables.locality import LocalityRow
from kvfleet.cli.paper.tables.out_of_memory import ContainmentRow
from kvfleet.cli.paper.tables.reuse import ReuseTurn
from kvfleet.cli.paper.tables.vault_restore import RestoreRow
from kvfleet.cli.paper.tables.windows import WindowRow

GOOD: dict[str, list[Any]] = {
    "reuse": [
        ReuseTurn(6, 1, 6, 0, 0.02, 0.02, "1.263 s"), ReuseTurn(6, 2, 26, 20, 0.02, 0.03, "0.795 s"),
        ReuseTurn(900, 1, 900, 0, 0.5, 0.5, ""), ReuseTurn(900, 2, 920, 914, 0.05, 0.5, ""),
    ],
    "sizes": [SizeRow("GPT-2", "K", "[5, 12, 64]", "[5, 12, 64]", "[5, 12, 64]")],
    "burst": [BurstRow(1, 20, 20, 0.1, 10.0, 100.0, ""), BurstRow(20, 20, 20, 0.3, 40.0, 400.0, "")],
    "batches": [BatchRow(size, 2 * size, 2 * size, 100.0 * size, 0.01, 0.02) for size in SIZES],
    "locality": [
        *(LocalityRow(f"w{at}", "worker", 4, 1250 + at, 5000, 0, "") for at in (-50, 0, 20, 30)),
        LocalityRow("one id", "repeat", 4, 20, 20, 0, ""),
        LocalityRow("w4 joined", "joined", 5, 1000, 5000, 0, ""),
        LocalityRow("w0 left", "left", 5, 900, 5000, 0, ""),
    ],
    "vault": [
        RestoreRow(1_000, 3, 0.02, 0.01, 0.03, 0.7, 992, True, ""),  # too short to be sooner
        RestoreRow(4_000, 3, 0.2, 0.01, 0.05, 4.0, 3_984, True, ""),
        RestoreRow(30_561, 1, 6.0, 0.1, 0.3, 20.0, 30_560, True, ""),
    ],
    "snr": [
        CodecRow(64, "normal", 3.76, 44.3, 44.5, ""), CodecRow(128, "normal", 3.88, 43.5, 43.7, ""),
        CodecRow(256, "normal", 3.94, 42.9, 43.1, ""),
    ],
    "windows": [
        WindowRow("windowed", 256, 300, 64, None, 17, 64, 64), WindowRow("windowed", 256, 1000, 1500, 17, 17, None, 0),
        WindowRow("whole", None, 1000, 1500, 139, 157, None, 0),
    ],
    "oom": [
        ContainmentRow("cannot fit", False, 3, 0, 3, 0, ""), ContainmentRow("fits", True, 8, 8, 0, 8, ""),
    ],
}  # fmt: skip

# Of each table: a row, what is wrong with it, and which criteria see that.
BAD: list[tuple[str, int, dict[str, Any], list[int]]] = [
    ("reuse", 3, {"ttft_s": 0.4}, [0]),
    ("reuse", 1, {"ttft_s": 0.06}, [1]),
    ("reuse", 3, {"cached_tokens": 800}, [2]),
    ("sizes", 0, {"found": "[6, 12, 64]"}, [0]),
    ("burst", 1, {"whole": 19}, [0]),
    ("burst", 1, {"tokens_per_s": 120.0}, [1]),
    ("burst", 0, {"tokens_per_s": 0.0}, [1]),
    ("locality", 0, {"sequences": 1100}, [0]),
    ("locality", 4, {"sequences": 19}, [1]),
    ("locality", 5, {"sequences": 1600}, [2]),
    ("locality", 6, {"sequences": 4000}, [3]),
    ("locality", 6, {"astray": 1}, [4]),
    ("vault", 1, {"times_sooner": 0.9}, [0]),
    ("vault", 2, {"times_sooner": 3.0}, [1]),
    ("vault", 0, {"from_vault": 0}, [2]),
    ("vault", 2, {"same_tokens": False}, [3]),
    ("snr", 2, {"least_snr_db": 35.0}, [0]),
    ("snr", 0, {"times_smaller": 3.5}, [1]),
    ("snr", 2, {"times_smaller": 3.8}, [2]),
    ("windows", 0, {"same_tokens": 63}, [0]),
    ("windows", 1, {"most_blocks": 18}, [1]),
    ("windows", 1, {"most_blocks": 0}, [1]),
    ("windows", 2, {"most_blocks": 20}, [2]),
    ("batches", 2, {"whole": 7}, [0]),
    ("batches", 0, {"tokens_per_s": 2500.0}, [1, 2]),
    ("batches", 4, {"tokens_per_s": 350.0}, [2]),
    ("oom", 0, {"failed_as_stated": 2, "answered": 1}, [0]),
    ("oom", 1, {"answered": 7}, [1]),
    ("oom", 1, {"same_as_alone": 7}, [2]),
]


def unmet(table: PaperTable, rows: Sequence[Any]) -> list[int]:
    return [at for at, criterion in enumerate(table.judge(rows)) if not criterion.is_met]


def test_every_table_has_rows_here() -> None:
    assert list(GOOD) == list(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_good_rows_meet_every_criterion(name: str) -> None:
    assert unmet(TABLES[name], GOOD[name]) == []


@pytest.mark.parametrize(("name", "at", "wrong", "seen"), BAD)
def test_what_is_wrong_is_seen(name: str, at: int, wrong: dict[str, Any], seen: list[int]) -> None:
    rows = [replace(row, **wrong) if number == at else row for number, row in enumerate(GOOD[name])]
    assert unmet(TABLES[name], rows) == seen


def test_every_criterion_fails_somewhere() -> None:
    for name, table in TABLES.items():
        seen = {one for bad, _, _, criteria in BAD if bad == name for one in criteria}
        assert seen == set(range(len(table.judge(GOOD[name])))), name


def test_nothing_measured_meets_nothing() -> None:
    assert not all_of("none", 0, 0).is_met
    assert not at_most("of nothing", ratio(1.0, 0.0), 2.0).is_met
    assert not at_least("of nothing", ratio(1.0, 0.0), 0.0).is_met


def test_a_table_that_could_not_be_measured_is_not_met() -> None:
    assert not TableResult(TABLES["reuse"], 1.0, error="no worker").is_met


def test_every_row_ends_with_what_was_printed() -> None:
    for rows in GOOD.values():
        assert list(type(rows[0]).__dataclass_fields__)[-1] == "paper"


def test_a_models_tokenizer_has_a_word_for_each_token(tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_model(GPT2, tmp_path)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert words.encode(" t5 t50256 t0").ids == [5, 50_256, 0]
    assert words.get_vocab_size() == GPT2.vocab_size
