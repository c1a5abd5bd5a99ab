"""Text without a tokenizer, for simulated fleets: each id is its decimal number and a space."""

from __future__ import annotations

from collections.abc import Sequence

from kvfleet.worker.text.detokenizer import Detokenizer, DetokenizerStream


class IdDetokenizer(Detokenizer):
    def __init__(self) -> None:
        pass

    @property
    def whole(self) -> Detokenizer:  # type: ignore[override]
        return self

    def stream(self, prompt_ids: Sequence[int]) -> DetokenizerStream:
        return IdStream()


class IdStream(DetokenizerStream):
    def __init__(self) -> None:
        self.pending = False

    def fork(self) -> IdStream:
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def skip(self, ids: Sequence[int]) -> str:
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        return ""
