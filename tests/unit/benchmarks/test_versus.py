"""The verdict of a benchmark with a peer: what is kept, what fails, and what is skipped for no fault of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine._engine import Step, Weights
from benchmarks.engine._versus import Part, Rival, Trials, conclude
from benchmarks.harness import peers
from benchmarks.harness.peers import Peer, PeerFailed
from benchmarks.harness.report import SKIPPED
from benchmarks.harness.yardstick_machine import Machine, measure_machine

Verdict = tuple[int, dict[str, Any]]
OURS_IS_SLOW = Part("slow", 0.5, 1.0)
KEPT = Part("kept", 2.0, 1.0)
# A peer program: says that it is ready, answers once, then goes the way that it is told.
PROGRAM = """
import json, sys
answers = iter(sys.argv[1].split("|"))
print(json.dumps({"ready": 0.1, "engine": "peer 1"}), flush=True)
for line in sys.stdin:
    answer = next(answers)
    if answer == "die":
        sys.exit("its last words")
    print(answer, flush=True)
"""


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Callable[[Trials], Verdict]:
    """Exit code and printed line of a benchmark with these parts."""

    def conclude_on(trials: Trials) -> Verdict:
        with pytest.raises(SystemExit) as ended:
            conclude("name", "times", trials, floor=1.0, peer="peer 1", threads=2)
        return int(str(ended.value.code)), json.loads(capsys.readouterr().out)

    return conclude_on


@pytest.fixture
def peer_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Callable[[], Rival]]:
    """Starts a real process in the place of transformers, which answers as told."""

    def peer_that_answers(answers: str) -> Callable[[], Rival]:
        program = tmp_path / "python"
        (tmp_path / "peer.py").write_text(PROGRAM)
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/peer.py '{answers}'\n")
        program.chmod(0o755)
        monkeypatch.setattr(peers, "interpreter", lambda name: str(program))
        return lambda: Rival("transformers", tmp_path, "float32")

    return peer_that_answers


def trials_of(*parts: Part, **skipped: str) -> Trials:
    trials = Trials()
    trials.parts += parts
    trials.skipped |= skipped
    return trials


def test_all_measured(verdict: Callable[[Trials], Verdict]) -> None:
    code, line = verdict(trials_of(KEPT))
    assert (code, line["ok"], line["value"], line["threads"]) == (0, True, 2.0, 2)
    code, line = verdict(trials_of(KEPT, OURS_IS_SLOW))
    assert (code, line["ok"], line["value"]) == (1, False, 0.5)


@pytest.mark.parametrize("kept", [[], [KEPT]])
def test_a_peer_that_gives_up_is_a_skip(kept: list[Part], verdict: Callable[[Trials], Verdict]) -> None:
    """What else was measured is said, but the whole claims nothing."""
    code, line = verdict(trials_of(*kept, lost="its last words"))
    assert code == SKIPPED
    assert line["ok"] is None
    assert line["value"] is None
    assert line["skipped"] == "lost: its last words"
    assert list(line["parts"]) == [part.name for part in kept]


def test_a_part_that_we_lost_fails_whatever_was_skipped(verdict: Callable[[Trials], Verdict]) -> None:
    code, line = verdict(trials_of(OURS_IS_SLOW, lost="its last words"))
    assert (code, line["ok"], line["value"]) == (1, False, 0.5)
    assert line["skipped_parts"] == {"lost": "its last words"}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("die", "its last words"),
        ('{"error": "continuous batching stopped"}', "continuous batching stopped"),
        ('{"seconds": 1.0, "tok', "transformers ended"),
    ],
)
def test_the_last_words_are_the_peer_s(
    answers: str, words: str, peer_that: Callable[[str], Callable[[], Rival]], verdict: Callable[[Trials], Verdict]
) -> None:
    trials, start = Trials(), peer_that(answers)
    with trials.of("gpt2"), start() as rival:
        rival.generate([[1, 2]], 4)
        raise AssertionError("the peer answered")
    code, line = verdict(trials)
    assert code == SKIPPED
    assert words in line["skipped"]


def test_a_peer_that_is_gone_before_it_is_asked(peer_that: Callable[[str], Callable[[], Rival]]) -> None:
    answer = json.dumps({"seconds": 1.0, "tokens": [[1]], "ttft_s": [0.5]})
    with peer_that(f"{answer}|die")() as rival:
        assert rival.generate([[1]], 1).tokens == [[1]]
        for _ in range(2):
            with pytest.raises(PeerFailed, match="transformers"):
                rival.generate([[1]], 1)


def test_a_peer_that_is_not_installed_is_a_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Callable[[Trials], Verdict]
) -> None:
    monkeypatch.setenv("KVFLEET_PEERS_DIR", str(tmp_path))
    trials = Trials()
    with trials.of("gpt2"):
        Peer("vllm", tmp_path, "float32")
    code, line = verdict(trials)
    assert code == SKIPPED
    assert "vllm is not installed" in line["skipped"]


def test_what_we_do_wrong_is_no_skip() -> None:
    with pytest.raises(ZeroDivisionError), Trials().of("gpt2"):
        raise ZeroDivisionError


# ---------------------------------------------------------------------------------------------- this machine's rates


@pytest.mark.parametrize(
    ("ratio", "share", "ok"), [(2.0, None, True), (2.0, 0.1, True), (0.5, 0.7, True), (0.5, 0.69, False)]
)
def test_a_part_is_kept_by_its_ratio_or_by_its_share_of_the_bound(ratio: float, share: float | None, ok: bool) -> None:
    part = Part("p", ratio, 1.0, share=share)
    assert part.ok is ok
    assert part.report().get("of_bound") == share


def test_the_bound_is_what_reading_or_multiplying_takes() -> None:
    machine = Machine(2, read=100.0, copy=50.0, multiply={torch.float32: 1000.0, torch.bfloat16: 500.0})
    assert machine.bound_s(200.0, 100.0) == 2.0
    assert machine.bound_s(200.0, 4000.0) == 4.0
    assert machine.bound_s(200.0, 4000.0, torch.bfloat16) == 8.0


def test_a_step_reads_weights_once_and_multiplies_for_each_token() -> None:
    model = _TinyModel()
    weights = Weights.of(model)
    assert (weights.body, weights.head, weights.dtype) == (12, 20, torch.float32)
    machine = Machine(1, read=128.0, copy=1.0, multiply={torch.float32: 64.0})
    assert weights.bound_s(machine, [Step(0.0, 0.0, 1, 0, 1)]) == 1.0  # 32 numbers of 4 bytes
    assert weights.bound_s(machine, [Step(0.0, 0.0, 1, 0, 1)], cached_bytes=128) == 2.0
    assert weights.bound_s(machine, [Step(0.0, 0.0, 1, 16, 16)]) == 2 * (12 * 16 + 20) / 64.0


class _TinyModel(torch.nn.Module):
    """A head tied to its embedding, positions that are looked up, one product."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(5, 4), torch.nn.Embedding(9, 4)
        self.product = torch.nn.Linear(4, 3, bias=False)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.yardstick_machine.READ_BYTES", 1 << 20)
    monkeypatch.setattr("benchmarks.harness.yardstick_machine.SIZE", 64)
    machine = measure_machine(torch.get_num_threads())
    assert min(machine.read, machine.copy, *machine.multiply.values()) > 0
    assert machine.multiply[torch.bfloat16] >= machine.multiply[torch.float32]
    assert set(machine.report()) == {"read_gb_per_s", "copy_gb_per_s", "multiply_gflop_per_s", "threads"}
