"""What was generated, as a stream of it said it; prompts to ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_rig import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenizer import byte_fallback, byte_level

from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.text.model_text import ModelText
from kvproto.errors import EngineFailure, InvalidRequest

TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
IDS = st.lists(st.integers(0, 258), max_size=80)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(relaxed, max_examples=150)
@given(prompt=IDS, ids=IDS, skip=st.booleans())
def test_as_the_pieces_of_a_stream(kind: str, prompt: list[int], ids: list[int], skip: bool) -> None:
    stream = Detokenizer(TOKENIZERS[kind], skip_special=skip).stream(prompt)
    pieces = [stream.push(token) for token in ids]
    told = ModelText(TOKENIZERS[kind]).generated(prompt, ids, skip_special=skip)
    assert told.startswith("".join(pieces))
    assert told == "".join(pieces) + stream.flush()


def test_special_tokens_and_refusals() -> None:
    text = ModelText(TOKENIZERS["byte level"])
    assert text.special == {"<s>": 0}
    assert text.encode("the", begins=True, field="prompt")
    with pytest.raises(InvalidRequest, match="no tokens") as refused:
        text.encode("", begins=True, field="messages")
    assert refused.value.field == "messages"

    def breaks(said: object, add_special_tokens: bool = False) -> SimpleNamespace:
        raise RuntimeError("a tokenizer's fault")

    text._detokenizer = SimpleNamespace(stream=breaks)
    with pytest.raises(EngineFailure, match="could not be made text"):
        text.generated((), (1,), skip_special=True)
    text._tokenizer = SimpleNamespace(encode=breaks)
    with pytest.raises(InvalidRequest, match="a tokenizer's fault"):
        text.encode("x", begins=False, field="messages")
