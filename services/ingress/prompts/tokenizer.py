"""Adapter: `tokenizers` and the chat template of one model, made from the worker's bundle.

The only importer of `tokenizers` here. Texts are encoded through the batch call, which lets other threads run (the
single one holds the interpreter for its whole time), so `encode` may be called from an executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from kvfleet.ingress.prompts.chat_template import ChatTemplate
from kvfleet.ingress.prompts.token_spelling import TokenSpelling
from kvproto.errors import InvalidRequest, Unavailable
from kvproto.messages import Bundle


class ModelTokenizer:
    """Text to ids and back as the worker does it, and chats to text. Immutable. Raises Unavailable for a bad bundle.

    `special_texts` are the spellings of special tokens, `special_ids` their ids; `spelling` is that of single tokens.
    """

    def __init__(self, bundle: Bundle) -> None:
        try:
            tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise Unavailable(f"the tokenizer of {bundle.model!r} cannot be read: {str(error)[:200]}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self.special_texts = tuple(special.values())
        added = set(tokenizer.get_added_tokens_decoder())
        self.spelling = TokenSpelling(bundle.tokenizer_json, tokenizer.id_to_token, self._decode_one, added)
        self._template = _template_of(bundle)
        self._max_token_chars = _longest_token(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """`add_special_tokens` puts the model's BOS in front (once per sequence); spelled-out specials always count."""
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _decode_one(self, token: int) -> str:
        return self.decode((token,))

    def render(self, messages: list[dict[str, str]]) -> str:
        """A chat with the generation prompt. Raises InvalidRequest when there is no template or it refuses."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template, use /v1/completions", field="model")
        if isinstance(self._template, InvalidRequest):  # completions work all the same
            raise self._template
        return self._template.render(messages)

    def least_tokens(self, text: str) -> int:
        """A lower bound for the tokens of a text, for free: it saves tokenising what can never fit. 0: unknown."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._max_token_chars) if self._max_token_chars else 0


def _template_of(bundle: Bundle) -> ChatTemplate | InvalidRequest | None:
    if not bundle.chat_template:
        return None
    special = dict(bundle.special_tokens)
    for name, token in (("bos_token", bundle.bos_token), ("eos_token", bundle.eos_token)):
        if token is not None:
            special.setdefault(name, token)
    try:
        return ChatTemplate(bundle.chat_template, special)
    except InvalidRequest as error:
        return error


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token where every byte of a text ends up in some token (byte-level, no normalizer); else 0.

    Byte-level vocabularies spell one byte as one character; added tokens are spelled as they are.
    """
    if tokenizer.normalizer is not None or not isinstance(tokenizer.decoder, ByteLevel):
        return 0
    return max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=0)
