"""Where a model's files are: the bundled demo, a folder, or a snapshot of a hub repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproto.errors import UnsupportedModel

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo_model"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]

# The names under which configurations give the number of positions.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length")


def context_length_of(value_of: Callable[[str], Any]) -> int | None:
    """From a configuration's values by name; None if it has none of CONTEXT_KEYS."""
    found = (value for value in map(value_of, CONTEXT_KEYS) if isinstance(value, int) and value > 1)
    return next(found, None)


def served_name(model: str) -> str:
    """The default name for clients: the folder's name, or the hub id."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def local_folder(model: str) -> Path | None:
    """None for a hub id. Raises UnsupportedModel if it can be neither."""
    if model == DEMO and not Path(model).is_dir():
        return DEMO_FOLDER
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UnsupportedModel(f"model folder {model!r} does not exist")
    return None


def resolve_model(model: str) -> Path:
    """A local folder with the model's files, downloaded if need be. Raises UnsupportedModel in one line."""
    folder = local_folder(model)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).splitlines()[0][:200]
        raise UnsupportedModel(f"{model!r} is neither a folder nor a model that the hub gives: {why}") from None
