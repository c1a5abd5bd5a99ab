"""The ingress tokenises and renders as transformers does, without transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingress_build import DEMO, demo_bundle, demo_tokenizer

from kvchat.chat_template import ChatTemplate
from kvfleet.ingress.prompts.tokenizer import ModelTokenizer
from kvproto.errors import InvalidRequest, Unavailable

TEXT = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n<|end|>'aé日🙂")), max_size=60)
ROLE = st.sampled_from(["system", "user", "assistant"])
CHATS = st.lists(st.fixed_dictionaries({"role": ROLE, "content": TEXT}), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@given(messages=CHATS)
@settings(max_examples=150, deadline=None)
def test_chats_equal_apply_chat_template(reference: Any, messages: list[dict[str, str]]) -> None:
    tokenizer = demo_tokenizer()
    text = tokenizer.render(messages)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.encode(text, add_special_tokens=False)) == list(expected)


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_texts_equal_the_reference(reference: Any, text: str) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert list(ids) == reference(text)["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == text
    assert len(ids) - 1 >= tokenizer.least_tokens(text)


# As models' templates are written: loops that break, macros, namespaces, JSON, marked generations, white space.
TEMPLATES = [
    "{%- for m in messages %}\n    {%- if loop.index > 3 %}{% break %}{% endif %}\n[{{ m.role }}] {{ m['content'] }}\n"
    "{% endfor %}",
    "{% macro line(m) %}{{ m.role | upper }}: {{ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ bos_token }}",
    "{{ messages | tojson(indent=2) }}{% if tools is not none %}tools{% endif %}{{ dict(a=1)['a'] }}",
    "   {% if add_generation_prompt %}\n  go\n{% endif %}\n{{ messages[0].content[:2] }}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_in_transformers(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": f' <é> "{i}" &\n'} for i in range(5)]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = utils.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **special
    )
    assert ChatTemplate(source, special).render(messages) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_what_a_template_refuses_is_the_messages_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert error.value.field == "messages"


def test_models_without_a_template_or_with_a_broken_one() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ModelTokenizer(replace(demo_bundle(), chat_template=None)).render([])
    broken = ModelTokenizer(replace(demo_bundle(), chat_template="{% if %}"))
    assert broken.encode("x", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="does not compile"):
        broken.render([])
    with pytest.raises(Unavailable, match="tokenizer of 'demo' cannot be read"):
        ModelTokenizer(replace(demo_bundle(), tokenizer_json="{}"))
