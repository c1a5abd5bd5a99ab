"""Kernels of attention over `KvPool`'s layout, `[blocks, layers, parts, kv_heads, block_size, head_dim]`.

Offsets into the pool count its numbers; int8 runs end in fp32 scales, one for each slot. Sums and weights are fp32,
products of fp32 are exact (no TF32).
"""

# mypy: ignore-errors
# Triton compiles these functions, by other rules than a checker's.
from __future__ import annotations

from kvgpu.triton_language import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LEVELS = tl.constexpr(127.0)
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small number added and taken away is rounded, half to even
ITEM_FIELDS = tl.constexpr(7)
MERGE_FIELDS = tl.constexpr(4)


@triton.jit
def store(
    key, value, slots, data, scales,
    key_token, key_head, value_token, value_head,  # strides
    layer, block_step, run, kv_heads,
    DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One token's K and V of one head, or its latent. `slots` `[T]`: block * block_size + offset; a token with -1 is
    not stored. Programs: `[T, kv_heads]`."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    at = slot // BLOCK * block_step + layer + head * run
    offset = slot % BLOCK
    numbers = tl.arange(0, PADDED)
    inside = (numbers < DIM) & (slot >= 0)
    for which in tl.static_range(PARTS):
        if which == 0:
            row = tl.load(key + token * key_token + head * key_head + numbers, mask=inside, other=0.0)
        else:
            row = tl.load(value + token * value_token + head * value_head + numbers, mask=inside, other=0.0)
        begin = at + which * kv_heads * run
        if QUANTIZED:
            row = row.to(tl.float32)
            scale = tl.div_rn(tl.max(tl.abs(row), 0), LEVELS)
            strange = tl.sum((row != row).to(tl.int32), 0)
            scale = tl.where(strange > 0, float("nan"), scale)
            inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
            level = tl.where(inverse > 0, row, 0.0) * inverse + ROUNDS - ROUNDS
            tl.store(data + begin + offset * DIM + numbers, level.to(tl.int8), mask=inside)
            tl.store(scales + (begin + BLOCK * DIM) // 4 + offset, scale, mask=slot >= 0)
        else:
            tl.store(data + begin + offset * DIM + numbers, row.to(data.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    out, query, data, scales, items, tables, sums, tops, sinks,
    scaling, softcap, window,
    query_token, query_head, out_token,  # strides; heads of `out` follow one another
    layer, block_step, run, kv_heads,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    """One item of `plan.Tiles`, one of `plan.HeadTiles`. `window` 0: all tokens. Partial results: `sums` `[partials,
    tiles of heads, ROWS, PADDED]`, and `tops` `[partials, tiles of heads, 2, ROWS]`, the largest score and the sum of
    weights of each row. A key has `TAIL` numbers more than a value; without a part of their own, values are keys.
    `SINKS`: there is one for each head, which the first part of a tile takes as a score without a value. `WIDENED`:
    products of fp32, for the interpreter, which has none of bf16. Programs: `[items, tiles of heads]`."""
    item = items + tl.program_id(0) * ITEM_FIELDS
    heads_tile = tl.program_id(1)
    kv_head = heads_tile // SHARE
    table = tables + tl.load(item)
    start = tl.load(item + 1)
    token = tl.load(item + 2)
    count = tl.load(item + 3)
    partial = tl.load(item + 6)
    low = tl.load(item + 4)
    high = tl.load(item + 5)
    if window > 0:
        low = tl.maximum(low, start + 1 - window)

    row = tl.arange(0, ROWS)
    numbers = tl.arange(0, PADDED)
    of_token = row // GROUP
    head = heads_tile * GROUP + row % GROUP
    is_row = of_token < count
    is_number = numbers < DIM
    position = start + of_token
    inside = is_row[:, None] & is_number[None, :]
    from_query = (token + of_token).to(tl.int64) * query_token + head * query_head
    asked = tl.load(query + from_query[:, None] + numbers[None, :], mask=inside, other=0.0)
    if WIDENED:
        asked = asked.to(tl.float32)
    if TAIL > 0:
        tail = tl.arange(0, TAIL_PADDED)
        of_tail = from_query[:, None] + DIM + tail[None, :]
        asked_tail = tl.load(query + of_tail, mask=is_row[:, None] & (tail < TAIL)[None, :], other=0.0)
        if WIDENED:
            asked_tail = asked_tail.to(tl.float32)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if SINKS:
        first_part = tl.load(item + 4) == 0
        top = tl.where(first_part, tl.load(sinks + head) * LOG2E, top)
        weight = tl.where(first_part, 1.0, weight)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    begin = low // KEYS * KEYS
    for first in range(begin, high, KEYS):
        place = first + tl.arange(0, KEYS)
        held = (place >= low) & (place < high)
        block = tl.load(table + place // BLOCK, mask=held, other=0).to(tl.int64)
        slot = place % BLOCK
        at = block * block_step + layer + kv_head * run
        of_key = (at + slot * (DIM + TAIL))[:, None] + numbers[None, :]
        there = held[:, None] & is_number[None, :]
        keys = tl.load(data + of_key, mask=there, other=0.0)
        if QUANTIZED:
            of_scale = (at + BLOCK * (DIM + TAIL)) // 4 + slot
            scale = tl.load(scales + of_scale, mask=held, other=0.0)[:, None]
            keys = (keys.to(tl.float32) * scale).to(query.dtype.element_ty)
        if PARTS == 1:
            values = keys
        else:
            values = tl.load(data + of_key + kv_heads * run, mask=there, other=0.0)
            if QUANTIZED:
                of_scale += kv_heads * run // 4
                values = values.to(tl.float32) * tl.load(scales + of_scale, mask=held, other=0.0)[:, None]
                values = values.to(query.dtype.element_ty)
        if WIDENED:
            keys = keys.to(tl.float32)
        score = tl.dot(asked, tl.trans(keys), input_precision="ieee")
        if TAIL > 0:
            of_rest = (at + slot * (DIM + TAIL) + DIM)[:, None] + tail[None, :]
            rest = tl.load(data + of_rest, mask=held[:, None] & (tail < TAIL)[None, :], other=0.0)
            if QUANTIZED:
                rest = (rest.to(tl.float32) * scale).to(query.dtype.element_ty)
            if WIDENED:
                rest = rest.to(tl.float32)
            score += tl.dot(asked_tail, tl.trans(rest), input_precision="ieee")
        score *= scaling
        if CAPPED:
            bent = tl.exp2(tl.abs(score) * (-2.0 * LOG2E) / softcap)  # tanh of an absolute value
            bent = (1.0 - bent) / (1.0 + bent) * softcap
            score = tl.where(score < 0, -bent, bent)
        seen = held[None, :] & (place[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (place[None, :] > position[:, None] - window)
        score = tl.where(seen, score * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        weight = weight * fade + tl.sum(weights, 1)
        weights = weights.to(query.dtype.element_ty)
        if WIDENED:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        total = total * fade[:, None] + tl.dot(weights, values, input_precision="ieee")
        top = higher

    if partial < 0:
        done = total / tl.where(weight > 0, weight, 1.0)[:, None]
        to_out = (token + of_token).to(tl.int64) * out_token + head * DIM
        tl.store(out + to_out[:, None] + numbers[None, :], done.to(out.dtype.element_ty), mask=inside)
    else:
        mine = partial.to(tl.int64) * tl.num_programs(1) + heads_tile
        tl.store(sums + (mine * ROWS + row)[:, None] * PADDED + numbers[None, :], total)
        tl.store(tops + mine * 2 * ROWS + row, top)
        tl.store(tops + (mine * 2 + 1) * ROWS + row, weight)


@triton.jit
def combine(
    out, merges, sums, tops, out_token, tiles,
    ROWS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What the parts of a tile give together, for one of `tiles` of heads. Programs: `[merges, tiles]`."""
    merge = merges + tl.program_id(0) * MERGE_FIELDS
    heads_tile = tl.program_id(1)
    token = tl.load(merge)
    count = tl.load(merge + 1)
    first = tl.load(merge + 2).to(tl.int64)
    parts = tl.load(merge + 3)
    row = tl.arange(0, ROWS)
    numbers = tl.arange(0, PADDED)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for part in range(parts):
        mine = (first + part) * tiles + heads_tile
        its_top = tl.load(tops + mine * 2 * ROWS + row)
        its_weight = tl.load(tops + (mine * 2 + 1) * ROWS + row)
        its_total = tl.load(sums + (mine * ROWS + row)[:, None] * PADDED + numbers[None, :])
        higher = tl.maximum(top, its_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, its_fade = tl.exp2(top - base), tl.exp2(its_top - base)
        weight = weight * fade + its_weight * its_fade
        total = total * fade[:, None] + its_total * its_fade[:, None]
        top = higher
    of_token = row // GROUP
    inside = (of_token < count)[:, None] & (numbers < DIM)[None, :]
    to_out = (token + of_token).to(tl.int64) * out_token + (heads_tile * GROUP + row % GROUP) * DIM
    done = total / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + to_out[:, None] + numbers[None, :], done.to(out.dtype.element_ty), mask=inside)
