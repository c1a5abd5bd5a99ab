"""How models write tool calls, by the names that `--tool-format` has."""

from __future__ import annotations

from collections.abc import Callable

from kvchat.formats import deepseek, harmony, hermes, llama, mistral, pythonic
from kvchat.source import Parsing, PartialText

FORMATS: dict[str, Callable[[PartialText], Parsing[None]]] = {
    "hermes": hermes.parse,
    "llama": llama.parse,
    "mistral": mistral.parse,
    "pythonic": pythonic.parse,
    "deepseek": deepseek.parse,
    "harmony": harmony.parse,
}
_SIGNS = {  # in a template, the surest first
    "harmony": ("<|channel|>",),
    "deepseek": (deepseek.ALL_BEGIN,),
    "mistral": (mistral.BEGIN,),
    "hermes": (hermes.BEGIN,),
    "pythonic": ("func_name1(params_name1=", pythonic.BEGIN),
    "llama": (llama.TAG, "Environment: ipython", '"parameters": dictionary of argument'),
}


def format_of(template: str) -> str:
    """The name of the format that a chat template asks for; "" if it says of none."""
    return next((name for name, signs in _SIGNS.items() if any(sign in template for sign in signs)), "")
