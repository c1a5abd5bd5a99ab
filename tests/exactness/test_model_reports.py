"""What `kvfleet bench paper` asks of the worker's own code: the codec's loss, and what transformers says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from kvfleet.worker.model.loader import DUMMY_SEED
from kvfleet.worker.model.reports import codec_report, reference_tokens

PROMPTS = [[5, 9, 200, 17], list(range(40))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = MistralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=96,
        head_dim=32, vocab_size=256, sliding_window=16, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, architectures=["MistralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return tmp_path


def test_the_codecs_loss_is_of_the_models_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codec_report.main([str(folder)])
    own, normal = json.loads(capsys.readouterr().out)
    assert (own["numbers"], normal["numbers"]) == (folder.name, codec_report.NORMAL)
    for one in (own, normal):
        numbers = one["raw_bytes"] // 4
        assert numbers == 2 * 2 * codec_report.BLOCK * 32, "layers, K and V, tokens, of one head"
        assert (one["head_dim"], one["int8_bytes"]) == (32, numbers + 4 * numbers // 32), "a scale for each head"
        assert 40 < one["least_snr_db"] <= one["median_snr_db"] < 50
    assert own["least_snr_db"] != normal["least_snr_db"]


def test_the_reference_is_the_argmax_of_every_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a whole forward pass for each token, without any cache, past the window too."""
    asked = json.dumps({"model": str(folder), "prompts": PROMPTS, "tokens": 12})
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    reference_tokens.main()
    found = json.loads(capsys.readouterr().out)
    torch.manual_seed(DUMMY_SEED)
    model = AutoModelForCausalLM.from_config(MistralConfig.from_pretrained(folder), dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for token in tokens:
                assert int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()) == token
                ids.append(token)
        assert len(tokens) == 12


def test_no_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        codec_report.main(["./nowhere"])
    assert capsys.readouterr().err == "kvfleet bench paper: model folder './nowhere' does not exist\n"
