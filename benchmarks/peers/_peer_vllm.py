"""vLLM's CPU build as a peer, run by its own interpreter: see `benchmarks.harness.peers`.

The engine core runs in this process and is stepped from here, so that no second process competes for the cores and no
token crosses a socket. Compiled, prefix caching on; what pins its threads is in the environment that `Peer` sets.
"""

from __future__ import annotations

import os
from argparse import Namespace
from itertools import count

from benchmarks.harness.peers import Run, flags, serve


class VLLM:
    """See `benchmarks.harness.peers.Engine`."""

    def __init__(self, options: Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cache_gib))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.name = f"vllm {vllm.__version__}"
        self._sampling = lambda tokens: vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self._numbers = count()
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(options.model),
                dtype=options.dtype,
                skip_tokenizer_init=True,
                generation_config="vllm",
                max_model_len=options.context,
                max_num_seqs=options.sequences,
                max_num_batched_tokens=options.batched_tokens,
                enable_prefix_caching=True,
                block_size=options.block_size or None,
                enforce_eager=bool(options.eager),
                disable_log_stats=True,
            )
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Run:
        run = Run.begin(prompts)
        owners: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            request = str(next(self._numbers))
            owners[request] = index
            self._engine.add_request(request, {"prompt_token_ids": prompt}, self._sampling(max_tokens))  # type: ignore[no-untyped-call]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                run.add(owners[output.request_id], list(output.outputs[0].token_ids))
        return run


if __name__ == "__main__":
    parser = flags()
    parser.add_argument("--cache-gib", type=int, default=4)
    parser.add_argument("--batched-tokens", type=int, default=4096, help="the default for offline use on a CPU")
    parser.add_argument("--block-size", type=int, default=0, help="0: vLLM's choice, 128 tokens")
    parser.add_argument("--eager", type=int, default=0, help="1: do not compile")
    serve(VLLM, parser)
