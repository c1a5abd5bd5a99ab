"""A LoRA adapter's folder, as peft writes it: what stands for its files, and what of it no server can take. Reads files
only, and no tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproto.errors import InvalidRequest
from kvproto.ids import base32

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank
MAX_HEADER_BYTES = 100 * 1024 * 1024  # of safetensors
# Modules that read what flows between layers, but for those of other towers than the text's.
_FROM_HIDDEN = re.compile(
    r"(?!.*(?:vision|visual|audio|encoder)).*"
    r"\.layers\.\d+\.(?:self_attn\.(?:q|k|v)_proj|mlp\.(?:gate|up)_proj)\.lora_A\.weight"
)


@dataclass(frozen=True, slots=True)
class LoraFolder:
    path: Path
    rank: int  # the highest of its modules
    weights: Path
    hidden_size: int | None  # of the models that it fits; None: not known

    @classmethod
    def read(cls, path: Path) -> LoraFolder:
        """Raises InvalidRequest, in one line."""
        try:
            config = json.loads((path / CONFIG).read_bytes())
            ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        except FileNotFoundError:
            why = f"there is no {CONFIG} in it" if path.is_dir() else "it is no folder"
            raise InvalidRequest(f"{path} is no LoRA adapter: {why}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"{path} is no LoRA adapter: {CONFIG} cannot be read: {why}") from None
        if not all(isinstance(rank, int) and 0 < rank <= RANKS[-1] for rank in ranks):
            raise InvalidRequest(f"{path} is no LoRA adapter that vLLM takes: its rank is not 1 to {RANKS[-1]}")
        weights = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
        if weights is None:
            raise InvalidRequest(f"{path} is no LoRA adapter: there is no {WEIGHTS[0]} in it")
        return cls(path, max(ranks), weights, _hidden_size(weights))

    def check_fits(self, model: Mapping[str, Any]) -> None:
        """`model` is the config.json of one. vLLM takes an adapter of a narrower model without a word, and answers
        nonsense. Raises InvalidRequest."""
        nested = model.get("text_config")
        theirs = (nested if isinstance(nested, dict) else model).get("hidden_size")
        if None not in (theirs, self.hidden_size) and theirs != self.hidden_size:
            raise InvalidRequest(
                f"{self.path} is an adapter of another model: of width {self.hidden_size}, not {theirs}"
            )

    def revision(self) -> str:
        """A digest of all its bytes. Raises OSError."""
        digest = hashlib.blake2b(digest_size=16)
        for path in (self.path / CONFIG, self.weights):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return base32(digest.digest())


def max_rank(folders: list[LoraFolder]) -> int:
    """The least that vLLM can be told for all of them."""
    most = max(folder.rank for folder in folders)
    return next(rank for rank in RANKS if rank >= most)


def _hidden_size(weights: Path) -> int | None:
    """Raises InvalidRequest for safetensors that are none."""
    if weights.suffix != ".safetensors":
        return None
    try:
        with weights.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)))
        found = {tensor["shape"][1] for name, tensor in header.items() if _FROM_HIDDEN.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidRequest(f"{weights} cannot be read: {type(error).__name__}: {error}") from None
    return int(found.pop()) if len(found) == 1 else None
