"""`pip install kvfleet`, which brings a producer's two libraries: every command says in one line what else it needs."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import msgpack
import nats
import pytest

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
NEEDS = {
    **dict.fromkeys(
        ["init", "generate", "chat", "explain", "top", "drain", "secrets", "key", "bench", "--help"], "cli"
    ),
    **dict.fromkeys(["plan", "kv-size"], "cli,worker"),
    **{service: service for service in ("worker", "ingress", "placement", "vault")},
    "simulate": "placement",
    "up": "all",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with this checkout, nats-py and msgpack."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for library in (nats, msgpack):
        assert library.__file__
        (packages / library.__name__).symlink_to(Path(library.__file__).parent)
    (packages / "checkout.pth").write_text(f"{ROOT}\n{ROOT / 'libs'}\n")
    return str(folder / "bin" / "python")


def said(python: str, *command: str, env: dict[str, str] | None = None) -> str:
    """The one line that it ends with."""
    asked = [python, "-P", "-m", "kvfleet.cli.main", *command]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env or {})
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", NEEDS)
def test_every_command_says_what_to_install(bare: str, command: str) -> None:
    line = said(bare, command)
    assert line.startswith("kvfleet: "), line
    assert line.endswith(f' is not installed: pip install "kvfleet[{NEEDS[command]}]"\n'), line


def test_no_word_is_answered_too(bare: str) -> None:
    assert 'pip install "kvfleet[cli]"' in said(bare)


def test_a_producer_s_library_works_there(bare: str) -> None:
    assert subprocess.run([bare, "-P", "-c", "import kvproto.client"], check=False, env={}).returncode == 0


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["kv-size", "demo"], "worker"),
        (["worker", "--nats-url=nats://127.0.0.1:1"], "worker"),
        (["simulate", "--trace=TRACE", "--workers=1", "--plot=/nowhere/p.svg"], "plot"),
    ],
)
def test_the_command_line_without_engines_and_pictures_says_so(tmp_path: Path, command: list[str], extra: str) -> None:
    """What a part of the code imports late is missed late."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'tokenizers', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    command = [word.replace("TRACE", str(trace)) for word in command]
    line = said(sys.executable, *command, env={"PYTHONPATH": str(tmp_path)})
    assert line.endswith(f' is not installed: pip install "kvfleet[{extra}]"\n'), line
