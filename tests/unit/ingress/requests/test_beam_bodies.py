"""Beam search in bodies: what it is called, and what it does not go with."""

from __future__ import annotations

from typing import Any

import pytest

from kvfleet.ingress.requests.bodies import read_chat, read_completion, read_generate
from kvproto.errors import InvalidRequest
from kvproto.messages import Beams, EarlyStopping

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
ROUTES = [(read_chat, CHAT), (read_completion, COMPLETION)]
SEARCH = {"use_beam_search": True}


@pytest.mark.parametrize(("read", "body"), ROUTES)
@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, Beams(1)),
        ({"n": 3}, Beams(3)),
        ({"n": 3, "best_of": 5}, Beams(5)),
        ({"best_of": 4, "length_penalty": -1, "early_stopping": True}, Beams(4, -1.0, EarlyStopping.TRUE)),
        ({"n": 2, "early_stopping": "never", "temperature": 0}, Beams(2, 1.0, EarlyStopping.NEVER)),
        ({"n": 2, "temperature": 1, "top_p": 1, "top_k": -1, "seed": 5, "stop": "a", "min_tokens": 2}, Beams(2)),
        ({"n": 2, "logit_bias": {"5": 1}, "repetition_penalty": 1.2, "presence_penalty": 1}, Beams(2)),
    ],
)
def test_beams_are_read(read: Any, body: dict[str, Any], said: dict[str, Any], meant: Beams) -> None:
    ask = read({**body, **SEARCH, **said})
    assert ask.sampling.beams == meant
    assert ask.sampling.at_once == meant.width
    assert read({**body, "use_beam_search": False, "early_stopping": False}).sampling.beams is None


@pytest.mark.parametrize(("read", "body"), ROUTES)
@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({**SEARCH, "n": 3, "best_of": 2}, "best_of"),
        ({**SEARCH, "best_of": 129}, "best_of"),
        ({**SEARCH, "length_penalty": 11}, "length_penalty"),
        ({**SEARCH, "early_stopping": "ever"}, "early_stopping"),
        ({**SEARCH, "temperature": 0.5}, "temperature"),
        ({**SEARCH, "top_p": 0.5}, "top_p"),
        ({**SEARCH, "top_k": 5}, "top_k"),
        ({**SEARCH, "min_p": 0.5}, "min_p"),
        ({**SEARCH, "guided_regex": "a"}, "guided_regex"),
        ({**SEARCH, "response_format": {"type": "json_object"}}, "response_format"),
        ({**SEARCH, "context_overflow": "sliding"}, "context_overflow"),
        ({**SEARCH, "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_what_it_does_not_go_with_is_refused(read: Any, body: dict[str, Any], said: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({**body, **said})
    assert str(caught.value.field).startswith(field)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"prompt": ["x"] * 9, "best_of": 128}, "n"),
    ],
)
def test_completions_refuse_more(said: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_completion({**COMPLETION, **SEARCH, **said})
    assert caught.value.field == field
    assert read_completion({**COMPLETION, **SEARCH, "echo": True}).sampling.beams == Beams(1)


def test_a_session_goes_on_with_the_best_beam() -> None:
    assert read_generate({"prompt": "x", **SEARCH, "best_of": 3}).sampling.beams == Beams(3)
