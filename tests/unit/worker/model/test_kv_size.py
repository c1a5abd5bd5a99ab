"""The memory formula, by hand."""

from __future__ import annotations

import pytest

from kvfleet.worker.model.kv_size import KvLayout, columns, kv_size, lengths, size_lines

QWEN = KvLayout(layers=24, kv_heads=2, head_dim=64, context_length=32_768)


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("float32", 24 * 2 * 2 * 64 * 4),
        ("bfloat16", 24 * 2 * 2 * 64 * 2),
        ("float16", 24 * 2 * 2 * 64 * 2),
        ("int8", 24 * 2 * 2 * (64 + 4)),
    ],
)
def test_bytes_of_a_token_and_of_a_block(kv_dtype: str, per_token: int) -> None:
    assert QWEN.bytes_per_token(kv_dtype) == per_token
    assert QWEN.bytes_per_block(16, kv_dtype) == 16 * per_token


def test_a_sequence_takes_whole_blocks_and_memory_holds_whole_sequences() -> None:
    size = kv_size(KvLayout(1, 1, 1, context_length=1030), 16, "int8", memory=10 * 16 * 10 * 65 + 9)
    whole = size.sequences[-1]
    assert (whole.tokens, whole.blocks, whole.bytes) == (1030, 65, 65 * 160)
    assert (size.blocks, whole.fit) == (650, 10)
    assert kv_size(QWEN, 16, "int8", memory=0).sequences[0].fit == 0


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 40])
def test_a_window_caps_what_a_sequence_holds_at_the_blocks_it_can_touch(window: int, block_size: int) -> None:
    layout = KvLayout(2, 2, 8, context_length=400, window=window)
    most = 0
    for tokens in range(1, 200):
        most = max(most, len({position // block_size for position in range(max(0, tokens - window), tokens)}))
        assert layout.blocks_of(tokens, block_size) >= most
    assert layout.blocks_of(400, block_size) == most


def test_lengths_end_with_the_context() -> None:
    assert lengths(512) == [512]
    assert lengths(4096) == [1024, 4096]
    assert lengths(40_960) == [1024, 4096, 8192, 32_768, 40_960]


def test_columns_name_what_auto_is_once() -> None:
    assert columns("bfloat16") == ["bfloat16", "float32", "int8"]
    assert columns("float32", ["int8", "auto", "float32"]) == ["int8", "float32"]


def test_what_a_worker_says_at_its_start() -> None:
    assert size_lines(QWEN, 16, "bfloat16", 1000) == [
        "KV of a token: 24 layers x 2 x 2 heads x 64 x 2 bytes = 12.0 KiB, of a block of 16: 192.0 KiB",
        "1,000 blocks, 187.5 MiB: 16,000 tokens; sequences at once: 15 of 1,024, 3 of 4,096, 1 of 8,192, 0 of 32,768",
    ]
    assert "x (64 x 1 + 4) bytes" in size_lines(QWEN, 16, "int8", 1000)[0]
