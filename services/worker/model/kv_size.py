"""How much memory keys and values take. Pure: the one formula behind `kvfleet kv-size` and a worker's start-up log.

    bytes of a token = layers * 2 * kv_heads * (head_dim * bytes of a number + bytes of a scale)

Latent attention stores one latent for all heads in their place: without the 2, and with one head. Only int8 has scales,
one for each token and head. A block holds `block_size` tokens for all layers. Where every layer
has a sliding window, a sequence holds no more blocks than its widest window touches. A recurrent state
is of one size, for a sequence as for a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.byte_size import readable

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = {"int8": 4}  # a float32
LENGTHS = (1024, 4096, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class KvLayout:
    layers: int
    kv_heads: int
    head_dim: int
    context_length: int
    window: int | None = None  # of the layer that sees furthest; None: the whole context
    parts: int = 2  # K and V, or latents alone
    state_bytes: int = 0  # of a sequence's recurrent state, whatever its length

    def bytes_per_token(self, kv_dtype: str) -> int:
        row = self.head_dim * NUMBER_BYTES[kv_dtype] + SCALE_BYTES.get(kv_dtype, 0)
        return self.layers * self.parts * self.kv_heads * row

    def bytes_per_block(self, block_size: int, kv_dtype: str) -> int:
        return block_size * self.bytes_per_token(kv_dtype)

    def blocks_of(self, tokens: int, block_size: int) -> int:
        """Blocks that a sequence of so many tokens holds while it decodes."""
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1) // block_size) + 1)  # a window may begin at the end of a block


@dataclass(frozen=True, slots=True)
class SequenceSize:
    tokens: int
    blocks: int
    bytes: int
    fit: int  # how many such sequences fit into the memory


@dataclass(frozen=True, slots=True)
class KvSize:
    kv_dtype: str
    bytes_per_token: int
    bytes_per_block: int
    blocks: int  # that fit into the memory
    sequences: tuple[SequenceSize, ...]


def kv_size(layout: KvLayout, block_size: int, kv_dtype: str, memory: int) -> KvSize:
    """For `lengths` of the context, with `memory` in bytes."""
    per_block = layout.bytes_per_block(block_size, kv_dtype)
    fitting = memory // per_block
    sequences = []
    for tokens in lengths(layout.context_length):
        blocks = layout.blocks_of(tokens, block_size)
        sequences.append(SequenceSize(tokens, blocks, blocks * per_block, fitting // blocks))
    return KvSize(kv_dtype, layout.bytes_per_token(kv_dtype), per_block, fitting, tuple(sequences))


def lengths(context_length: int) -> list[int]:
    return [*(length for length in LENGTHS if length < context_length), context_length]


def size_lines(layout: KvLayout, block_size: int, kv_dtype: str, num_blocks: int) -> list[str]:
    size = kv_size(layout, block_size, kv_dtype, num_blocks * layout.bytes_per_block(block_size, kv_dtype))
    each = ", ".join(f"{one.fit:,} of {one.tokens:,}" for one in size.sequences)
    return [
        f"KV of a token: {formula(layout, kv_dtype)} = {readable(size.bytes_per_token)}, "
        f"of a block of {block_size}: {readable(size.bytes_per_block)}",
        f"{num_blocks:,} blocks, {readable(num_blocks * size.bytes_per_block)}: {num_blocks * block_size:,} tokens; "
        f"sequences at once: {each}",
    ]


def formula(layout: KvLayout, kv_dtype: str) -> str:
    row = f"{layout.head_dim} x {NUMBER_BYTES[kv_dtype]}"
    if kv_dtype in SCALE_BYTES:
        row = f"({row} + {SCALE_BYTES[kv_dtype]})"
    each = "1 latent" if layout.parts == 1 else f"2 x {layout.kv_heads} heads"
    return f"{layout.layers} layers x {each} x {row} bytes"


def columns(auto: str, asked: Sequence[str] = ()) -> list[str]:
    """The number formats to compare, by default the usual ones; "auto" stands for `auto`, the model's own."""
    named = [auto if one == "auto" else one for one in asked or ("auto", "float32", "bfloat16", "int8")]
    return list(dict.fromkeys(named))
