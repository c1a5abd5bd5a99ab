"""Hugging Face transformers as a peer, run by our own interpreter: see `benchmarks.harness.peers`.

`generate` is its continuous batching with a manager that stays up; `generate_plain` is `model.generate` on one padded
batch with a DynamicCache. Times of tokens are taken where transformers itself hands them out.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from benchmarks.harness.peers import Run, flags, serve


class Transformers:
    """See `benchmarks.harness.peers.Engine`."""

    def __init__(self, options: Namespace) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        self.name = f"transformers {transformers.__version__}"
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        pages = options.sequences * -(-options.context // options.page_size)
        self._manager = self._model.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=options.page_size,
                num_blocks=2 * pages,  # as many again, for prefixes to stay
                max_batch_tokens=options.batch_tokens,
                max_requests_per_batch=options.sequences,
                allow_block_sharing=True,
                default_compile_level=options.compile_level,
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Run:
        run = Run.begin(prompts)
        names = self._manager.add_requests(prompts, max_new_tokens=max_tokens, record_timestamps=True)
        owners = {name: index for index, name in enumerate(names)}
        while owners:
            result = self._manager.get_result(timeout=60)
            assert result is not None, "continuous batching has stopped"
            assert result.error is None, result.error
            if result.is_finished():
                index = owners.pop(result.request_id)
                run.tokens[index] = list(result.generated_tokens)
                run.first_at[index] = result.timestamps[0]
        run.ended = time.perf_counter()
        return run

    def generate_plain(self, prompts: list[list[int]], max_tokens: int) -> Run:
        run = Run.begin(prompts)
        longest = max(map(len, prompts))
        ids = self._torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self._torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

        def each_step(sequences: Any, _: Any, **__: Any) -> Any:
            for index, token in enumerate(sequences[:, -1].tolist()):
                run.add(index, [token])
            return self._torch.zeros(len(sequences), dtype=self._torch.bool)

        with self._torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[each_step],
            )
        return run


if __name__ == "__main__":
    parser = flags()
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--compile-level", type=int, default=0)
    serve(Transformers, parser)
