"""`--lora NAME=FOLDER` of `kvfleet up`: which adapters are meant, and what a vLLM server is told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvproto.errors import InvalidRequest
from kvproto.messages.vocabulary import MAX_NAME_CHARS
from kvservice.lora_folder import LoraFolder, max_rank

AT_RUN_TIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
IN_MEMORY = 32  # adapters: one that vLLM drops for others it reads again later, and ends where its folder is gone


def read_loras(given: Sequence[str], model: str, served_name: str) -> dict[str, LoraFolder]:
    """By name. `model` is a folder, or else what it is like is not known. Raises InvalidRequest, in one line."""
    found: dict[str, LoraFolder] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not (name and folder) or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(f"{one!r} is not NAME=FOLDER")
        if name in (served_name, *found):
            raise InvalidRequest(f"{name!r} is the name of another one")
        found[name] = LoraFolder.read(Path(folder).absolute())
        config = Path(model) / "config.json"
        if config.is_file():
            found[name].check_fits(json.loads(config.read_bytes()))
    return found


def lora_words(loras: Mapping[str, LoraFolder], theirs: set[str]) -> list[str]:
    """All may run in one step. `theirs` are flags that the user gives, which count."""
    if not loras:
        return []
    wanted = {"--max-lora-rank": str(max_rank([*loras.values()])), "--max-loras": str(len(loras))}
    if "--max-loras" not in theirs:
        wanted["--max-cpu-loras"] = str(max(IN_MEMORY, len(loras)))
    words = [word for flag, value in wanted.items() if flag not in theirs for word in (flag, value)]
    modules = [json.dumps({"name": name, "path": str(lora.path)}) for name, lora in loras.items()]
    return ["--enable-lora", *words, "--lora-modules", *modules]
