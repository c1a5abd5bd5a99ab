"""The logits processor for vLLM's second model runner (GPU, Triton), which refuses the first one's form.

--logits-processors kvfleet_vllm.slot_sampler:SlotSampler
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from kvfleet_vllm.row_sampling import sampling_of
from kvfleet_vllm.slot_sampling import SlotSampling
from kvfleet_vllm.wire import KEY
from kvsampling.sampler import warm_up


class SlotSampler(LogitsProcessor):  # type: ignore[misc]
    """Requests that do not ask for it are not touched. The draw ends on the host, so a step waits for the device."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError(f"{KEY} draws one token of a sequence at a time, without speculative decoding")
        self._states = req_states
        self._slots = SlotSampling(lambda slot, count: req_states.all_token_ids.gpu[slot, :count].tolist())
        warm_up(req_states.device)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        asked = (sampling_params.extra_args or {}).get(KEY)
        if asked is not None:
            sampling_of(asked)
            if sampling_params.temperature != 0:
                raise ValueError(f"{KEY} draws, so vLLM's own temperature must be 0")

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self._slots.add(req_idx, (sampling_params.extra_args or {}).get(KEY))

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        slots = ctx.idx_mapping_np
        self._slots.choose(
            logits,
            slots.tolist(),
            ctx.seq_lens_upper_bound_np[: len(slots)].tolist(),  # exact without speculative decoding
            self._states.prompt_len.np[slots].tolist(),
            self._states.prefill_len.np[slots].tolist(),
        )
        return logits
