"""An adapter's folder: its revision is of all its bytes, and what no server can take is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvproto.errors import InvalidRequest
from kvservice.lora_folder import CONFIG, WEIGHTS, LoraFolder, max_rank
from tests.support.lora_adapter import write_adapter


def test_equal_files_have_one_revision_wherever_they_are(tmp_path: Path) -> None:
    a, b = (LoraFolder.read(write_adapter(tmp_path / name, 1)) for name in "ab")
    assert a.revision() == b.revision()
    assert (a.rank, a.hidden_size) == (8, 256)


def test_another_byte_anywhere_is_another_revision(tmp_path: Path) -> None:
    adapter = LoraFolder.read(write_adapter(tmp_path, 1))
    found = {adapter.revision()}
    weights = bytearray(adapter.weights.read_bytes())
    for at in (len(weights) // 3, len(weights) - 1):
        weights[at] ^= 1
        adapter.weights.write_bytes(weights)
        found.add(adapter.revision())
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 17'))
    found.add(adapter.revision())
    assert len(found) == 4


def test_the_rank_is_the_highest_and_one_that_vllm_can_be_told(tmp_path: Path) -> None:
    plain = LoraFolder.read(write_adapter(tmp_path / "plain", 1, rank=4))
    mixed = LoraFolder.read(write_adapter(tmp_path / "mixed", 1, rank=4, rank_pattern={"q_proj": 20}))
    assert (plain.rank, mixed.rank) == (4, 20)
    assert (max_rank([plain]), max_rank([plain, mixed])) == (8, 32)


def test_one_of_a_wider_or_narrower_model_does_not_fit(tmp_path: Path) -> None:
    adapter = LoraFolder.read(write_adapter(tmp_path, 1))
    for fits in ({"hidden_size": 256}, {"text_config": {"hidden_size": 256}, "hidden_size": 9}, {}):
        adapter.check_fits(fits)
    for other in ({"hidden_size": 64}, {"text_config": {"hidden_size": 512}}):
        with pytest.raises(InvalidRequest, match="of width 256, not"):
            adapter.check_fits(other)


def test_the_width_of_another_tower_is_not_the_models(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, 1) / WEIGHTS[0]
    tensors = {name.replace("model.layers", "vision_tower.layers"): one for name, one in load_file(weights).items()}
    save_file(tensors, weights)
    assert LoraFolder.read(tmp_path).hidden_size is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (CONFIG, None, "there is no adapter_config.json in it"),
        (CONFIG, "{", "adapter_config.json cannot be read"),
        (CONFIG, "{}", "adapter_config.json cannot be read"),
        (CONFIG, "[]", "adapter_config.json cannot be read"),
        (CONFIG, '{"r": 513}', "its rank is not 1 to 512"),
        (CONFIG, '{"r": "x"}', "its rank is not 1 to 512"),
        (WEIGHTS[0], None, "there is no adapter_model.safetensors in it"),
        (WEIGHTS[0], "no tensors", "cannot be read"),
    ],
)
def test_what_is_none_is_refused_in_one_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = write_adapter(tmp_path, 1) / name
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=says) as refused:
        LoraFolder.read(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere is no LoRA adapter: it is no folder"):
        LoraFolder.read(tmp_path / "nowhere")
