"""Adapters on the command line: what `kvfleet up --lora` tells vLLM, and what it and `kvfleet lora` refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_vllm_servers import AT, CPU, values
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.cli.embedded.lora_flags import read_loras
from kvfleet.cli.embedded.vllm_servers import VllmServers
from kvproto.errors import InvalidRequest
from kvservice.lora_folder import LoraFolder
from tests.support.lora_adapter import write_adapter

DEMO_WIDTH = 256


def servers(folder: Path, *flags: str, loras: dict[str, LoraFolder] | None = None) -> VllmServers:
    return VllmServers(CPU, folder, folder, flags, [], 1, "warning", loras or {})


def test_vllm_is_told_of_all_of_them(tmp_path: Path) -> None:
    given = [f"{name}={write_adapter(tmp_path / name, 1, rank)}" for name, rank in (("red", 8), ("blue, the 2nd", 20))]
    made = servers(tmp_path, "--enforce-eager", loras=read_loras(given, "org/model", "model"))
    command = made.command("w0", "org/model", "model", AT, {})
    told = values(command)
    assert (told["--max-lora-rank"], told["--max-loras"], told["--max-cpu-loras"]) == ("32", "2", "32")
    assert "--enable-lora" in command
    first = command.index("--lora-modules") + 1
    assert [json.loads(word) for word in command[first : first + 2]] == [
        {"name": "red", "path": str(tmp_path / "red")},
        {"name": "blue, the 2nd", "path": str(tmp_path / "blue, the 2nd")},
    ]
    assert made.environment({})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_without_any_vllm_is_as_it_was(tmp_path: Path) -> None:
    made = servers(tmp_path)
    assert "lora" not in " ".join(made.command("w0", "m", "m", AT, {}))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in made.environment({})


def test_one_that_can_have_adapters_takes_them_at_run_time(tmp_path: Path) -> None:
    made = servers(tmp_path, "--enable-lora", "--max-lora-rank", "64")
    assert made.environment({})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_users_own_limits_count(tmp_path: Path) -> None:
    loras = read_loras([f"red={write_adapter(tmp_path, 1)}"], "m", "m")
    command = servers(tmp_path, "--max_loras=4", loras=loras).command("w0", "m", "m", AT, {})
    assert [word for word in command if "max" in word and "loras" in word] == ["--max_loras=4"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["red"], "'red' is not NAME=FOLDER"),
        (["=here"], "'=here' is not NAME=FOLDER"),
        (["demo={}"], "'demo' is the name of another one"),
        (["red={}", "red={}"], "'red' is the name of another one"),
        (["red=/nowhere"], "/nowhere is no LoRA adapter: it is no folder"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, given: list[str], says: str) -> None:
    folder = write_adapter(tmp_path, 1)
    with pytest.raises(InvalidRequest, match=says):
        read_loras([one.format(folder) for one in given], "demo", "demo")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--lora", "a=b"], "--lora a=b: the own engine has no adapters: only with --engine vllm"),
        (["--engine", "vllm", "--lora", "a=/nowhere"], "--lora: /nowhere is no LoRA adapter: it is no folder"),
        (
            ["--engine", "vllm", "--model", "a/b", "--model", "c/d", "--lora", "a=b"],
            "--lora: with one --model only",
        ),
    ],
)
def test_up_refuses_in_one_line_before_anything_starts(flags: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["up", *flags])
    assert done.exit_code in (1, 2)
    assert done.stderr == f"kvfleet: {line}\n"


def test_up_knows_the_width_of_a_model_that_is_a_folder(tmp_path: Path) -> None:
    narrow = write_adapter(tmp_path / "narrow", 1, hidden=DEMO_WIDTH // 2)
    done = CliRunner().invoke(app, ["up", "--engine", "vllm", "--lora", f"a={narrow}"])
    assert (done.exit_code, "of width 128, not 256" in done.stderr, done.stderr.count("\n")) == (1, True, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["red"], "name a folder, or say --unload"),
        (["red", "/folder", "--unload"], "name a folder, or say --unload"),
        (["red", "/folder", "--worker", "w 1"], "'w 1' is no worker's id"),
    ],
)
def test_lora_refuses_in_one_line(words: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["lora", *words])
    assert (done.exit_code, done.stderr) == (2, f"kvfleet: {line}\n")
