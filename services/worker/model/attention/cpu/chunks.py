"""How many tokens the kernels take at a time. Pure."""

from __future__ import annotations

DECODE_CHUNK = 256  # tokens whose scores a decode keeps at a time
PREFILL_CHUNK = 128
PAIRED_GROUP = 3  # heads that share K and V from which on preparing pairs pays for one token
