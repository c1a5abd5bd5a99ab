"""Overflow policies as arithmetic."""

from __future__ import annotations

import pytest
from engine_rig import relaxed
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.text.context_window import ContextWindow
from kvproto.errors import ContextLengthExceeded
from kvproto.messages import Overflow


def of(prompt: int, max_tokens: int, overflow: Overflow, context: int = 10) -> ContextWindow:
    return ContextWindow.of(prompt, max_tokens, context, overflow)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "overflow", "field"),
    [
        (10, 1, Overflow.ERROR, "prompt_ids"),
        (4, 7, Overflow.ERROR, "max_tokens"),
        (10, 1, Overflow.TRUNCATE_GENERATION, "prompt_ids"),
        (1, 10, Overflow.TRUNCATE_LEFT, "max_tokens"),
    ],
)
def test_what_no_policy_can_help_is_refused(prompt: int, max_tokens: int, overflow: Overflow, field: str) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        of(prompt, max_tokens, overflow)
    assert caught.value.field == field


def test_a_context_of_one_token_cannot_slide() -> None:
    with pytest.raises(ContextLengthExceeded):
        of(1, 1, Overflow.SLIDING, context=1)


@pytest.mark.parametrize("overflow", Overflow)
def test_what_fits_is_left_alone(overflow: Overflow) -> None:
    window = of(4, 5, overflow)
    assert (window.max_tokens, [window.start(total) for total in range(4, 10)]) == (5, [0] * 6)


def test_left_drops_as_much_of_the_prompt_as_is_too_much() -> None:
    window = of(30, 4, Overflow.TRUNCATE_LEFT)
    assert (window.start(30), window.start(33), window.max_tokens) == (24, 24, 4)


def test_generation_is_cut_to_the_room_there_is() -> None:
    assert of(7, 100, Overflow.TRUNCATE_GENERATION).max_tokens == 3


@relaxed
@given(st.integers(2, 40), st.integers(1, 300), st.integers(0, 300))
def test_sliding_drops_the_older_half_whenever_the_context_is_full(context: int, prompt: int, outputs: int) -> None:
    """A window that was slid token by token starts where one does that knows the number of tokens alone."""
    window, start = of(prompt, 1000, Overflow.SLIDING, context), 0
    for total in range(1, prompt + outputs + 1):
        if total - start == context:
            start += context // 2
        assert window.start(total) == start
        assert 0 < total - start < context
