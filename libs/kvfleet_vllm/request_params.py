"""What a worker asks of the vLLM beside it, in a request's `kv_transfer_params["kvfleet"]`. Pure.

{"version": VERSION, "socket": PATH,
 "store": {"path": FILE, "slots": N, "block_tokens": 16},     blocks may be moved
 "restore": {"at": first_block, "slots": [...],               blocks of its tokens that lie there
             "state": [...]},                                 of a model with states, the one behind them
 "save_from": block}                                          those from this one on are wanted
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvfleet_vllm.block_moves import SharedStore
from kvfleet_vllm.wire import KEY, VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The blocks from number `restore_at` on lie in `restore_slots`, the state behind them in `restore_state`.
    `save_from` is None where none is wanted."""

    socket: str
    store: SharedStore | None = None
    restore_at: int = 0
    restore_slots: tuple[int, ...] = ()
    restore_state: tuple[int, ...] = ()
    save_from: int | None = None


def params_of(params: Any, tokens: int) -> RequestParams | None:
    """None if no worker of ours sent the request. One whose blocks are not understood, or not of `tokens` tokens, moves
    none."""
    asked = params.get(KEY) if isinstance(params, dict) else None
    if not isinstance(asked, dict):
        return None
    if asked.get("version") != VERSION or not isinstance(asked.get("socket"), str):
        log.warning("kv_transfer_params of a worker that this version (%d) does not understand: %.200r", VERSION, asked)
        return None
    plain = RequestParams(asked["socket"])
    if asked.get("store") is None:
        return plain
    try:
        return _with_blocks(asked, tokens)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("blocks are not moved, %s: %.200r", error, asked)
        return plain


def _with_blocks(asked: dict[str, Any], tokens: int) -> RequestParams:
    store, restore, save_from = asked["store"], asked.get("restore") or {}, asked.get("save_from")
    if store["block_tokens"] != tokens:
        raise ValueError(f"blocks have {tokens} tokens")
    if not isinstance(store["path"], str):
        raise TypeError("a path is text")
    at, wanted = _number(restore.get("at", 0)), None if save_from is None else _number(save_from)
    slots, state = (tuple(map(_number, restore.get(name, ()))) for name in ("slots", "state"))
    return RequestParams(asked["socket"], SharedStore(store["path"], _number(store["slots"])), at, slots, state, wanted)


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no number of blocks or slots")
    return value
