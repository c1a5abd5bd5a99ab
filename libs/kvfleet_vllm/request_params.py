"""What a worker asks of the vLLM beside it, in a request's `kv_transfer_params["kvfleet"]`. Pure.

{"version": VERSION, "socket": PATH,
 "store": {"path": FILE, "slots": N, "piece_tokens": 16},     pieces may be moved
 "restore": {"at": first_piece, "slots": [...]},              pieces of its tokens that lie there
 "save_from": piece}                                          those from this one on are wanted
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvfleet_vllm.block_moves import PIECE_TOKENS, SharedStore
from kvfleet_vllm.wire import KEY, VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The pieces from number `restore_at` on lie in `restore_slots`. `save_from` is None where none is wanted."""

    socket: str
    store: SharedStore | None = None
    restore_at: int = 0
    restore_slots: tuple[int, ...] = ()
    save_from: int | None = None


def params_of(params: Any) -> RequestParams | None:
    """None if no worker of ours sent the request. One whose pieces are not understood moves none."""
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
        return _with_pieces(asked)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("pieces are not moved, %s: %.200r", error, asked)
        return plain


def _with_pieces(asked: dict[str, Any]) -> RequestParams:
    store, restore, save_from = asked["store"], asked.get("restore") or {}, asked.get("save_from")
    if store["piece_tokens"] != PIECE_TOKENS:
        raise ValueError(f"pieces have {PIECE_TOKENS} tokens")
    if not isinstance(store["path"], str):
        raise TypeError("a path is text")
    at, slots = _number(restore.get("at", 0)), tuple(map(_number, restore.get("slots", ())))
    wanted = None if save_from is None else _number(save_from)
    return RequestParams(asked["socket"], SharedStore(store["path"], _number(store["slots"])), at, slots, wanted)


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no number of pieces or slots")
    return value
