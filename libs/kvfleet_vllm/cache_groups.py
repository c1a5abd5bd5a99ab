"""vLLM's cache groups, as far as moving their blocks goes: which have blocks of all tokens, and which have states.
Pure; imports nothing of vLLM.

Layers of one kind are a group, or several; each group has a block table of its own. A block of any group lies in the
same bytes: its number says which.

    attention   a slot has a block of each of these groups, for the same tokens
    states      a layer's state for all tokens so far: one block a group, good where a step ended with a block

A block that vLLM has let go of, as it lies before a window or a later state, is number 0 in the table, and NONE here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = -1  # no block
_DENSE = {"full_attention", "mla_attention"}
_WINDOWED = {"sliding_window"}  # what of it is needed, vLLM's table says when it is restored
_STATE = "mamba"  # state-space, linear attention and short convolutions alike
_SPLIT = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The numbers of the groups, and the `tokens` of a block in each of them. With 0 tokens none is moved: `why`."""

    tokens: int = 0
    attention: tuple[int, ...] = (0,)
    states: tuple[int, ...] = ()
    why: str = ""

    @property
    def are_several(self) -> bool:
        return len(self.attention) + len(self.states) > 1

    @property
    def state_slots(self) -> int:
        """That one state takes."""
        return -(-len(self.states) // len(self.attention))

    def blocks(self, tables: Sequence[Sequence[int]], first: int, end: int) -> tuple[int, ...]:
        """Of a request's block tables the blocks from number `first` to `end`, slot after slot."""
        return tuple(tables[group][at] or NONE for at in range(first, end) for group in self.attention)

    def state(self, tables: Sequence[Sequence[int]], end: int) -> tuple[int, ...]:
        """The blocks of its state behind `end` blocks, and NONE up to a whole slot."""
        blocks = [tables[group][end - 1] or NONE for group in self.states]
        return (*blocks, *[NONE] * (self.state_slots * len(self.attention) - len(blocks)))


def movable_groups(config: Any, groups: Sequence[Mapping[str, Any]] | None, reports_requests: bool) -> CacheGroups:
    """Of a VllmConfig and its cache groups as `engine_facts` tells them. Of several groups a load that fails can only
    be told where vLLM `reports_requests`, not blocks."""
    if not groups:
        return CacheGroups(why="vLLM does not tell its cache groups")
    kinds = [one["kind"] for one in groups]
    attention = tuple(at for at, kind in enumerate(kinds) if kind in _DENSE | _WINDOWED)
    states = tuple(at for at, kind in enumerate(kinds) if kind == _STATE)
    refused = _of_any(config, kinds) or (_of_several(config, groups, reports_requests) if len(groups) > 1 else "")
    if refused:
        return CacheGroups(why=refused)
    return CacheGroups(groups[0]["block_size"] or 0, attention, states)


def _of_any(config: Any, kinds: Sequence[str | None]) -> str:
    """Why blocks are not moved; "" if they are."""
    if others := {str(kind) for kind in kinds if kind not in {*_DENSE, *_WINDOWED, _STATE}}:
        return f"a cache of the kind {', '.join(sorted(others))}"
    if not _DENSE.intersection(kinds):
        return "no layer attends to all tokens"
    if split := [name for name in _SPLIT if getattr(config.parallel_config, name, 1) != 1]:
        return f"{split[0]} is not 1"
    return "calculate_kv_scales" if getattr(config.cache_config, "calculate_kv_scales", False) else ""


def _of_several(config: Any, groups: Sequence[Mapping[str, Any]], reports_requests: bool) -> str:
    cache = config.cache_config
    sizes = {one["block_size"] for one in groups}
    if not reports_requests:
        return "this vLLM cannot be told of a load that failed, of a model with several cache groups"
    if len(sizes) > 1 or getattr(cache, "prefix_match_unit", None) not in (None, *sizes):
        return f"cache groups with blocks of {sorted(sizes)} tokens, or hits within a block"
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding of a model with several cache groups"
    if not all(one.get("is_moved") for one in groups):
        return "a cache group that vLLM does not have moved"
    if any(one["kind"] == _STATE and one.get("state_mode") != "align" for one in groups):
        return "states that are not kept at the ends of blocks: --mamba-cache-mode align"
    return "states that are put together from several steps" if getattr(cache, "use_replayssm", False) else ""
