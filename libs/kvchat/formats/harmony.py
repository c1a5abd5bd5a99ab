"""gpt-oss: messages of channels. What comes after the prompt's `<|start|>assistant`:

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>
... <|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import re

from kvchat.source import Parsing, PartialText

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=functions\.([\w.-]+)")
THOUGHT = "analysis"
THINKS, SPEAKS = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
ANSWERS = "<|channel|>final<|message|>"


def parse(source: PartialText) -> Parsing[None]:
    while (yield from source.peek()):
        head = yield from source.take_until(MESSAGE)
        if head is None:
            yield from source.say_until(())
            return
        to, channel = _TO.search(head), _CHANNEL.search(head)
        if to is not None and to[1] in source.tools:
            source.begin_call(to[1])
            yield from source.argue_until(ENDS)
        else:
            aloud = channel is None or channel[1] != THOUGHT
            yield from source.say_until(ENDS, aloud=aloud)
