"""DeepSeek: marks around all calls and around each, with a name and a JSON object between them.

V3, R1    ...call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1      ...call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from kvchat.json_calls import value
from kvchat.source import Parsing, PartialText

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def parse(source: PartialText) -> Parsing[None]:
    while marker := (yield from source.say_until((ALL_BEGIN, BEGIN, ALL_END))):
        if marker != BEGIN:
            continue
        source.mark(BEGIN)
        name = yield from source.take_until(SEPARATOR)
        if name == "function":
            name = yield from source.take_until("\n")
            yield from source.take(f"{FENCE}json")
        yield from source.skip_blank()
        if name not in source.tools or (yield from source.peek()) != "{":
            source.take_back()
            continue
        source.keep()
        source.begin_call(str(name))
        yield from value(source, source.argue)
        yield from source.skip_blank()
        yield from source.take(FENCE)
        yield from source.take(END)
