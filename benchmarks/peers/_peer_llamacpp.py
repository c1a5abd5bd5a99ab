"""llama.cpp as a peer, run by an interpreter that has llama-cpp-python and gguf: see `benchmarks.harness.peers`.

Uses the batch calls as llama.cpp's own server does: one token of every running sequence, then as much of waiting
prompts as fits; logits only where a token is drawn; a new prompt takes the sequence with which it shares the longest
beginning, and keeps that. The model folder is converted to GGUF once, next to its safetensors.
"""

from __future__ import annotations

import ctypes
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.peers import Run, flags, serve


class LlamaCpp:
    """See `benchmarks.harness.peers.Engine`."""

    def __init__(self, options: Namespace) -> None:
        import llama_cpp

        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        self._c: Any = llama_cpp
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(to_gguf(options.model)).encode(), loading)
        assert self._model, "llama.cpp cannot load the model"
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = options.context * options.sequences
        asked.n_seq_max = options.sequences
        asked.n_batch, asked.n_ubatch = options.batch, options.micro_batch
        asked.n_threads = asked.n_threads_batch = options.threads
        asked.kv_unified = bool(options.unified)
        # By default llama.cpp keeps K and V in fp16, and its flash attention computes in fp16 on a CPU, also over fp32:
        # greedy tokens then differ from all other engines. So neither for fp32, unless asked for.
        exact = options.dtype == "float32"
        asked.flash_attn_type = int(not exact) if options.flash_attention < 0 else options.flash_attention
        cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        asked.type_k = asked.type_v = options.cache_type if options.cache_type >= 0 else cache
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        assert self._context, "llama.cpp cannot make a context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._size = options.batch
        self._batch = llama_cpp.llama_batch_init(options.batch, 0, 1)
        self._kept: list[list[int]] = [[] for _ in range(options.sequences)]  # the tokens cached in each sequence

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Run:
        run = Run.begin(prompts)
        homes = self._place(prompts)
        fed = [self._reuse(home, prompt) for home, prompt in zip(homes, prompts, strict=True)]
        wanted = range(len(prompts))
        while any(len(run.tokens[index]) < max_tokens for index in wanted):
            rows: list[tuple[int, int, int, bool]] = []  # token, position, sequence, draws
            drawing = []
            for index in wanted:
                if run.tokens[index] and len(run.tokens[index]) < max_tokens:
                    rows.append((run.tokens[index][-1], fed[index], homes[index], True))
                    drawing.append(index)
                    fed[index] += 1
            for index in wanted:
                prompt = prompts[index]
                stop = min(len(prompt), fed[index] + self._size - len(rows))
                if fed[index] < stop:
                    last = len(prompt) - 1
                    rows += [(prompt[at], at, homes[index], at == last) for at in range(fed[index], stop)]
                    fed[index] = stop
                    if stop == len(prompt):
                        drawing.append(index)
            for index, token in zip(drawing, self._decode(rows), strict=True):
                run.add(index, [token])
        for home, prompt, tokens in zip(homes, prompts, run.tokens, strict=True):
            self._kept[home] = prompt + tokens[:-1]
        return run

    def _place(self, prompts: list[list[int]]) -> list[int]:
        """A sequence for each prompt: of the free ones that with the longest common beginning, then the emptiest."""
        free = set(range(len(self._kept)))
        homes = []
        for prompt in prompts:
            home = max(free, key=lambda at: (_common(self._kept[at], prompt), -len(self._kept[at]), -at))
            free.remove(home)
            homes.append(home)
        return homes

    def _reuse(self, home: int, prompt: list[int]) -> int:
        """Forget what the sequence holds beyond the common beginning; its length. The last token is always computed."""
        common = min(_common(self._kept[home], prompt), len(prompt) - 1)
        self._c.llama_memory_seq_rm(self._memory, home, common, -1)
        return common

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run the rows; the likeliest next token of each that draws, in order."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, draws) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = draws
        status = self._c.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode answered {status}"
        outputs = sum(draws for *_, draws in rows)
        if not outputs:
            return []
        logits = ctypes.cast(self._c.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        chosen: list[int] = np.ctypeslib.as_array(logits, (outputs, self._vocab)).argmax(axis=1).tolist()
        return chosen


def _common(left: list[int], right: list[int]) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


# Conversion: the same numbers under llama.cpp's names.

_GPT2 = {
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_QWEN2 = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TOP = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm",
    "embed_tokens": "token_embd", "norm": "output_norm",
}  # fmt: skip


def to_gguf(folder: Path) -> Path:
    """The folder's GGUF file, in the folder's dtype, written if it is not there yet."""
    import gguf

    path = folder / "model.gguf"
    if path.exists():
        return path
    shape = json.loads((folder / "config.json").read_text())
    gpt2 = shape["model_type"] == "gpt2"
    partial = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, shape["model_type"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(shape["n_positions" if gpt2 else "max_position_embeddings"])
    writer.add_embedding_length(shape["n_embd" if gpt2 else "hidden_size"])
    writer.add_block_count(shape["n_layer" if gpt2 else "num_hidden_layers"])
    writer.add_head_count(shape["n_head" if gpt2 else "num_attention_heads"])
    if gpt2:
        writer.add_feed_forward_length(shape["n_inner"] or 4 * shape["n_embd"])
        writer.add_layer_norm_eps(shape["layer_norm_epsilon"])
    else:
        writer.add_feed_forward_length(shape["intermediate_size"])
        writer.add_head_count_kv(shape["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
        writer.add_rope_freq_base((shape.get("rope_parameters") or shape)["rope_theta"])
    for name, (dtype, array) in _tensors(folder / "model.safetensors"):
        theirs = _rename(name, _GPT2 if gpt2 else _QWEN2)
        if theirs is None:
            continue
        if gpt2 and array.ndim == 2 and ".h." in f".{name}":
            array = np.ascontiguousarray(array.T)  # GPT-2's Conv1D keeps its weights the other way round
        if dtype == "BF16" and array.ndim == 2:
            writer.add_tensor(theirs, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:  # llama.cpp wants norms and biases in fp32
            writer.add_tensor(theirs, _widened(array) if dtype == "BF16" else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def _rename(name: str, inner: dict[str, str]) -> str | None:
    parts = name.removeprefix("transformer.").removeprefix("model.").split(".")
    kind = parts.pop()
    if parts[0] in ("h", "layers"):
        theirs = inner.get(".".join(parts[2:]))
        return theirs and f"blk.{parts[1]}.{theirs}.{kind}"
    return f"{_TOP[parts[0]]}.{kind}" if parts[0] in _TOP else None


def _tensors(path: Path) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    """Name, dtype and content; bf16 as uint16, which numpy has."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(raw[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(raw[8:start])).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
            content = np.frombuffer(raw[start + begin : start + end].tobytes(), kind)
            yield name, (entry["dtype"], content.reshape(entry["shape"]))


def _widened(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    parser = flags()
    parser.add_argument("--batch", type=int, default=2048, help="tokens of one llama_decode")
    parser.add_argument("--micro-batch", type=int, default=512)
    parser.add_argument("--unified", type=int, default=0, help="1: one K/V buffer for all sequences")
    parser.add_argument("--flash-attention", type=int, default=-1, help="0: off, 1: on, -1: off for fp32")
    parser.add_argument("--cache-type", type=int, default=-1, help="GGML type of K and V; -1: fp32, or fp16 for bf16")
    serve(LlamaCpp, parser)
