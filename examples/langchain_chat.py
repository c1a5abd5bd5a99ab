"""LangChain's ChatOpenAI on the fleet: two turns of a chat, streamed. The second turn finds the first one cached.

pip install langchain-openai
python examples/langchain_chat.py --url http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import os

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI


def turn(model: ChatOpenAI, messages: list[BaseMessage]) -> AIMessage:
    """Prints the answer as it comes, then what of the prompt was cached."""
    whole = AIMessageChunk(content="")
    for piece in model.stream(messages):
        print(piece.content, end="", flush=True)
        whole = whole + piece
    usage = whole.usage_metadata
    assert usage is not None
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    print(f"\n[{cached} of {usage['input_tokens']} prompt tokens cached, {usage['output_tokens']} generated]")
    return AIMessage(whole.content)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two turns of a chat through LangChain.")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=60)
    said = parser.parse_args()
    model = ChatOpenAI(
        model=said.model,
        base_url=f"{said.url}/v1",
        api_key=os.environ.get("KVFLEET_API_KEY", "none"),
        max_tokens=said.max_tokens,
        stream_usage=True,
    )
    messages: list[BaseMessage] = []
    for text in ("Good morrow, friend. How do you fare?", "What news from the court?"):
        print(f"you: {text}")
        messages.append(HumanMessage(text))
        messages.append(turn(model, messages))


if __name__ == "__main__":
    main()
