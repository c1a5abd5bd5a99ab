"""How `kvfleet up --engine vllm` starts vLLM: command, environment, and what it says where it cannot. No vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.cli.embedded import vllm_python, vllm_servers
from kvfleet.cli.embedded.vllm_python import NoVllm, VllmPython, find_vllm, link_packages
from kvfleet.cli.embedded.vllm_servers import VllmAddresses, VllmServers, given, local_model, refused
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.vllm.server_facts import LOGPROBS, SAMPLER

AT = VllmAddresses(8000, 9001, 9002)
CPU, GPU = VllmPython("/vllm/python", True), VllmPython("/vllm/python", False)


def servers(
    folder: Path, *flags: str, python: VllmPython = CPU, at_once: int = 2, level: str = "warning"
) -> VllmServers:
    return VllmServers(python, folder, folder, flags, ["--dtype=auto"], at_once, level)


def values(command: list[str]) -> dict[str, str]:
    """What stands behind each flag; the last one counts."""
    return {one: two for one, two in zip(command, [*command[1:], ""], strict=True) if one.startswith("--")}


def test_the_command_has_all_that_a_worker_needs(tmp_path: Path) -> None:
    command = servers(tmp_path, "--enforce-eager").command("w3", "demo", "demo", AT, {})
    told = values(command)
    assert command[:3] == ["/vllm/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-1] == "--enforce-eager"
    assert (told["--model"], told["--served-model-name"], told["--port"]) == (str(DEMO_FOLDER), "demo", "8000")
    assert (told["--max-logprobs"], told["--logits-processors"]) == (str(LOGPROBS), SAMPLER)
    assert (told["--scheduling-policy"], told["--block-size"]) == ("priority", "32")
    assert {"--enable-scale-out", "--no-async-scheduling", "--dtype=auto"} <= set(command)
    assert json.loads(told["--kv-transfer-config"])["kv_connector_module_path"] == "kvfleet_vllm.connector"
    events = json.loads(told["--kv-events-config"])
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://127.0.0.1:9001", "tcp://127.0.0.1:9002")
    assert events["topic"] == "w3"


def test_the_user_s_own_flags_take_the_place_of_ours(tmp_path: Path) -> None:
    command = servers(tmp_path, "--block_size=64").command("w0", "m", "m", AT, {})
    assert [word for word in command if "block" in word] == ["--block_size=64"]


@pytest.mark.parametrize(
    ("flags", "python", "size"),
    [([], CPU, "32"), (["--block-size", "64", "-O3"], CPU, "64"), (["--block_size=64"], GPU, "64"), ([], GPU, None)],
)
def test_the_worker_s_blocks_are_as_large_as_vllm_s(
    tmp_path: Path, flags: list[str], python: VllmPython, size: str | None
) -> None:
    told = servers(tmp_path, *flags, python=python).worker_flags()
    assert told == ([] if size is None else [f"--block-size={size}"])


def test_servers_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_servers, "gpus", lambda: ["0", "1"])
    made = servers(tmp_path, python=GPU, at_once=2)
    alone = values(made.command("w0", "m", "m", AT, {}))
    made.at_once = 3
    beside = values(made.command("w0", "m", "m", AT, {}))
    assert beside.keys() - alone.keys() == {"--gpu-memory-utilization"}
    assert beside["--gpu-memory-utilization"] == "0.450"
    assert "--block-size" not in beside


def test_the_second_model_runner_has_a_sampler_of_its_own(tmp_path: Path) -> None:
    command = servers(tmp_path).command("w0", "m", "m", AT, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert values(command)["--logits-processors"] == "kvfleet_vllm.slot_sampler:SlotSampler"


def test_what_the_environment_has_already_stays(tmp_path: Path) -> None:
    made = servers(tmp_path, at_once=10_000)
    plain = made.environment({})
    assert (plain["VLLM_CPU_KVCACHE_SPACE"], plain["OMP_NUM_THREADS"]) == ("1", "1")
    own = made.environment({"VLLM_CPU_KVCACHE_SPACE": "7", "PYTHONPATH": "/mine"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in own
    assert own["PYTHONPATH"] == f"{made.packages}{os.pathsep}/mine"


def test_a_flag_for_the_cache_is_not_overruled_by_a_variable(tmp_path: Path) -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in servers(tmp_path, "--kv-cache-memory-bytes", "5G").environment({})


def test_flags_are_known_however_they_are_written() -> None:
    assert given(["--a_b=1", "--c-d.e", "x", "-O3"]) == {"--a-b", "--c-d"}
    assert refused(["--enforce-eager", "--kv_events_config.topic=x"]) == "--kv-events-config"
    assert refused(["--enforce-eager"]) is None


def test_a_folder_named_demo_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert local_model("demo") == "demo"


def test_only_our_packages_are_found_in_the_folder(tmp_path: Path) -> None:
    folder = link_packages(tmp_path / "path")
    asked = "import kvfleet_vllm, kvsampling, kvproto.messages; print(kvfleet_vllm.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", asked], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(folder))
    assert not (folder / "kvfleet").exists()


def a_python(folder: Path, said: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"is_cpu": true, "missing": ["vllm", "msgpack"]}', " has no vllm: make vllm-install"),
        ('{"is_cpu": true, "missing": ["Python 3.11"]}', " has no Python 3.11: "),
        ("hello", " is no Python: "),
    ],
)
def test_a_python_without_vllm_is_told_from_one_with_it(tmp_path: Path, said: str, why: str) -> None:
    with pytest.raises(NoVllm) as error:
        find_vllm(a_python(tmp_path, said))
    assert f"{tmp_path}/python{why}" in str(error.value)
    found = find_vllm(a_python(tmp_path, '{"is_cpu": false, "missing": []}'))
    assert found == VllmPython(str(tmp_path / "python"), False)


def test_the_checkout_s_own_vllm_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_python, "ROOT", tmp_path)
    folder = tmp_path / ".tools" / "vllm" / "bin"
    folder.mkdir(parents=True)
    a_python(folder, '{"is_cpu": true, "missing": []}')
    assert find_vllm(None) == VllmPython(str(folder / "python"), True)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--engine", "vllm", "--runner", "fake"], "--runner: not with --engine vllm"),
        (["--engine", "vllm", "--blocks", "64"], "--blocks: not with --engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "--device: not with --engine vllm"),
        (["--engine", "vllm", "--", "--port", "3"], "--port: kvfleet up gives vLLM its own"),
        (
            ["--engine", "vllm", "--engine-python", "/nowhere"],
            "--engine vllm: /nowhere does not exist: make vllm-install",
        ),
        (
            ["--engine", "vllm", "--", "--lora-modules", "a=b"],
            "--lora-modules: kvfleet up gives vLLM its own, of each --lora",
        ),
        (["--", "--enforce-eager"], "--enforce-eager: only with --engine vllm"),
        (["--engine-python", "x"], "--engine-python: only with --engine vllm"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["up", *flags])
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith(f"kvfleet: {line}")
    assert done.stderr.count("\n") == 1
