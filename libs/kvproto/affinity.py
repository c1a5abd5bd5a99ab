"""The ring key of a request: what should land on one worker again. Pure.

The session if the request names one; else the first tokens of its prompt, so that equal prefixes meet. Placement and
the client's fallback use the same key on equal rings, so they agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvproto.block_hash import pack_ids

PREFIX_TOKENS = 64  # four blocks: past the start of a chat template, short enough that turns of one chat agree


def ring_key(tenant: str, *, session: str | None, prompt_ids: Sequence[int] = (), prompt: str | None = None) -> str:
    """Key for the hash ring. Tenants never share one: their caches are apart anyway."""
    if session:
        return f"{tenant}/s/{session}"
    if prompt_ids:
        return f"{tenant}/p/{hashlib.blake2b(pack_ids(prompt_ids[:PREFIX_TOKENS]), digest_size=16).hexdigest()}"
    return f"{tenant}/t/{hashlib.blake2b((prompt or '')[: 4 * PREFIX_TOKENS].encode(), digest_size=16).hexdigest()}"
