"""A model folder's bundle: what an ingress needs, or one line that names what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfleet.worker.engine.bundle import bundle_hash, model_revision, read_bundle, read_public_prefixes
from kvfleet.worker.model.model_folder import DEMO_FOLDER, resolve_model, served_name
from kvfleet.worker.model.support import supported_context
from kvproto import codec
from kvproto.errors import InvalidRequest, UnsupportedModel
from kvproto.messages import Bundle


def read(folder: Path, **changes: object) -> Bundle:
    options = {"load_format": "auto", "dtype": "auto", "block_size": 16, **changes}
    return read_bundle(folder, "m", **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def test_the_demos_bundle() -> None:
    bundle = read(DEMO_FOLDER)
    assert bundle.context_length >= 2048
    assert bundle.vocab_size == 1024
    assert bundle.stop_ids
    assert bundle.chat_template
    assert codec.decode(Bundle, codec.encode(bundle)) == bundle
    assert bundle_hash(bundle) == bundle_hash(read(DEMO_FOLDER))


def test_what_decides_the_bytes_of_k_and_v_decides_the_revision(folder: Path) -> None:
    base = model_revision(folder, "auto", "auto")
    assert model_revision(DEMO_FOLDER, "auto", "auto") == base
    assert model_revision(folder, "dummy", "auto") != base
    assert model_revision(folder, "auto", "bfloat16") != base
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    assert model_revision(folder, "auto", "auto") != base


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        read(tmp_path / "empty")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        read(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config\.json cannot be read"):
        read(folder)


def test_public_prefixes_are_floored_to_blocks(tmp_path: Path) -> None:
    text = "Thou art a gentle and a courteous knight, and all the court doth love thee well, my lord of Gloucester."
    path = tmp_path / "prefixes.json"
    path.write_text(json.dumps([text, "short"]))
    bundle = read(DEMO_FOLDER, public_prefixes=read_public_prefixes(path))
    (ids,) = bundle.public_prefixes
    assert len(ids) % 16 == 0
    assert len(ids) >= 16
    for wrong in ("{", '{"a": 1}', "[1]"):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest) as caught:
            read_public_prefixes(path)
        assert caught.value.field == "public_prefixes_file"
    assert read_public_prefixes(None) == []


def test_where_a_model_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("demo") == DEMO_FOLDER
    assert resolve_model(str(folder)) == folder
    assert served_name(str(folder)) == "model"
    assert served_name("org/name") == "org/name"
    with pytest.raises(UnsupportedModel, match="does not exist"):
        resolve_model("/nowhere/at/all")


def test_a_fine_tune_of_one_matrix_is_another_model(folder: Path) -> None:
    """Of equal size, with equal ends."""
    base = model_revision(folder, "auto", "auto")
    (weights,) = folder.glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    tensors = sorted((one["data_offsets"] for name, one in header.items() if name != "__metadata__"))
    start, end = tensors[len(tensors) // 2]
    begin = 8 + int.from_bytes(raw[:8], "little") + start
    raw[begin : begin + (end - start)] = bytes(reversed(raw[begin : begin + (end - start)]))
    weights.unlink()
    weights.write_bytes(raw)
    assert model_revision(folder, "auto", "auto") != base


def test_weights_with_a_broken_header_have_a_revision_too(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    weights.write_bytes(b"\xff" * 100)
    broken = model_revision(folder, "auto", "auto")
    weights.write_bytes((5).to_bytes(8, "little") + b"[1,2]" + b"x" * 100)
    assert model_revision(folder, "auto", "auto") != broken


@pytest.mark.parametrize(
    "key", ["max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length"]
)
def test_a_bundle_and_an_engine_read_one_context_length(key: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10, key: 77}))
    config = SimpleNamespace(**{key: 77})
    config.get_text_config = lambda: config
    assert read(folder).context_length == supported_context(config) == 77


@pytest.mark.parametrize("name", ["response_template", "response_schema"])
def test_what_the_tokenizer_says_of_messages(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    good: dict[str, object] = {"start_anchor": "A:", "fields": {"content": {}}}
    if name == "response_schema":
        good = {"type": "object", "properties": {"content": {"type": "string", "x-regex": "(.*)"}}}
    for said, kept in ((good, json.dumps(good)), ({"fields": {}}, ""), ({"x-regex": "("}, ""), ("text", ""), ({}, "")):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, name: said}))
        assert read(folder).response_schema == kept
    assert caplog.text.count("is left aside: it cannot be read") == 3
