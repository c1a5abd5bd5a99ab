"""The bundle of a model folder, for ingresses: tokenizer, chat template, generation defaults. Files only, no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import Tokenizer

from kvchat.formats.own import own_format
from kvfleet.worker.model.model_folder import context_length_of
from kvproto import codec
from kvproto.errors import InvalidRequest, UnsupportedModel
from kvproto.ids import base32
from kvproto.messages import Bundle

log = logging.getLogger(__name__)

UNTOLD_CONTEXT = 2048
_SAMPLED_BYTES = 65_536
_TENSOR_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 1024 * 1024  # as in the format itself
MAX_PUBLIC_PREFIXES = 256  # a worker's record lists them, and is renewed every second
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return value


def _tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    if not any((folder / name).exists() for name in _SLOW_TOKENIZER_FILES):
        raise UnsupportedModel(f"{folder} has no tokenizer: no tokenizer.json, tokenizer.model or vocabulary in it")
    from transformers import AutoTokenizer  # only to convert a slow tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        text: str = tokenizer.backend_tokenizer.to_str()
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{folder} has no tokenizer that can be used: {error}") from None
    return text


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def model_revision(folder: Path, load_format: str, dtype: str) -> str:
    """A digest of configuration, weights and dtype, part of every block hash's root. Of weights it samples name, size
    and ends of each file and beginning and middle of each tensor, so a fine-tune of some matrices is another model."""
    digest = hashlib.blake2b(f"{load_format}\0{dtype}\0".encode(), digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    if load_format != "dummy":
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLED_BYTES))
                for at in [*_tensor_places(file, size), size - _SAMPLED_BYTES]:
                    file.seek(max(0, at))
                    digest.update(file.read(_SAMPLED_BYTES if at == size - _SAMPLED_BYTES else _TENSOR_BYTES))
    return base32(digest.digest())


def _tensor_places(file: BinaryIO, size: int) -> list[int]:
    """Beginning and middle of each tensor of a safetensors file, in file order; empty if the header is invalid."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, _MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(file.read(length))
        spans = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        return sorted(8 + length + at for start, end in spans for at in (start, (start + end) // 2))
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def read_bundle(
    folder: Path,
    name: str,
    *,
    load_format: str,
    dtype: str,
    block_size: int,
    public_prefixes: Sequence[str] = (),
    tool_format: str = "",
) -> Bundle:
    """Raises UnsupportedModel naming the file that is missing or wrong."""
    config_path = folder / "config.json"
    if not config_path.exists():
        raise UnsupportedModel(f"{folder} is no model folder: there is no config.json in it")
    config = _read_json(config_path)
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else config
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    tokens = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    special = {key: text for key, text in tokens.items() if key.endswith("_token") and isinstance(text, str)}
    ends = generation.get("eos_token_id", text_config.get("eos_token_id"))
    top_k = generation.get("top_k")
    tokenizer_json = _tokenizer_json(folder)
    return Bundle(
        model=name,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        stop_ids=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        context_length=context_length_of(text_config.get) or UNTOLD_CONTEXT,
        vocab_size=int(text_config.get("vocab_size", 0)),
        default_temperature=_number(generation.get("temperature")),
        default_top_p=_number(generation.get("top_p")),
        default_top_k=top_k if isinstance(top_k, int) else None,
        model_revision=model_revision(folder, load_format, dtype),
        block_size=block_size,
        special_tokens=special,
        tool_format=tool_format,
        public_prefixes=_whole_blocks(tokenizer_json, public_prefixes, block_size),
        response_schema=_response_schema(tokenizer_config),
    )


def _response_schema(tokenizer_config: dict[str, Any]) -> str:
    """As JSON; "" if there is none that can be read."""
    name = next((name for name in ("response_template", "response_schema") if tokenizer_config.get(name)), None)
    said = "" if name is None else json.dumps(tokenizer_config[name], ensure_ascii=False)
    try:
        if said:
            own_format(said)
    except ValueError as error:
        log.warning("the %s of the model's tokenizer is left aside: it %s", name, error)
        return ""
    return said


def read_public_prefixes(path: Path | None) -> list[str]:
    """Raises InvalidRequest unless the file holds a JSON list of strings."""
    if path is None:
        return []
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="public_prefixes_file") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{path} must hold a JSON list of strings", field="public_prefixes_file")
    if len(texts) > MAX_PUBLIC_PREFIXES:
        raise InvalidRequest(f"{path} may hold {MAX_PUBLIC_PREFIXES} texts at most", field="public_prefixes_file")
    return texts


def _whole_blocks(tokenizer_json: str, texts: Sequence[str], block_size: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text, floored to whole blocks. Warns of a text that text prompts will not share: too short, or
    without what the tokenizer puts in front of them."""
    if not texts:
        return ()
    tokenizer = Tokenizer.from_str(tokenizer_json)
    whole, own = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    starts = (at for at in range(len(whole)) if whole[at : at + len(own)] == own)
    head = tuple(whole[: next(starts, 0)])  # BOS, or nothing
    found = []
    for number, text in enumerate(texts, 1):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        if len(ids) < block_size:
            about = number, len(ids), block_size
            log.warning("public prefix %d is not shared: its %d tokens are less than a block of %d", *about)
            continue
        if ids[: len(head)] != head:
            log.warning(
                "public prefix %d does not begin with %r, which the model's tokenizer puts in front of prompts: those "
                "of /generate and /v1/completions will never match it. Write that in front of the text",
                number,
                tokenizer.decode(list(head), skip_special_tokens=False),
            )
        found.append(ids[: len(ids) // block_size * block_size])
    return tuple(found)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def bundle_hash(bundle: Bundle) -> str:
    """An ingress fetches the bundle again when this changes."""
    return base32(hashlib.blake2b(codec.encode(bundle), digest_size=16).digest())
