"""Which attention a model gets on its device, and whether it computes what the reference does there."""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch

from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.attention.trial import differs, forms_of
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.support import name_of
from kvproto.errors import InvalidRequest, UnsupportedModel

log = logging.getLogger(__name__)

Attention = Literal["auto", "cpu", "triton", "flashinfer", "reference"]


def chosen_for(attention: Attention, device: torch.device) -> Attention:
    """Raises InvalidRequest if it cannot run here. A CPU runs a GPU's where Triton's interpreter is asked for."""
    if attention == "auto":
        return "cpu" if device.type == "cpu" else "triton"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (attention == "cpu" and device.type != "cpu") or (
        attention in ("triton", "flashinfer") and device.type == "cpu" and not interpreted
    ):
        raise InvalidRequest(f"the {attention} attention cannot run on {device}", field="attention")
    return attention


def _triton(device: torch.device) -> AttentionBackend:
    from kvgpu.attention.backend import TritonBackend

    return TritonBackend(device)


def _flashinfer(loaded: LoadedModel) -> AttentionBackend:
    """Raises InvalidRequest if it is not installed, or has no kernels for the model."""
    from kvgpu.attention.flashinfer_backend import FlashInferBackend, refusal

    why = refusal(loaded.kv_shape, sinks=loaded.sinks)
    if why:
        raise InvalidRequest(
            f"the flashinfer attention cannot serve {name_of(loaded.config)}: {why}", field="attention"
        )
    try:
        return FlashInferBackend(loaded.device)
    except ImportError as error:
        why = f"FlashInfer cannot be imported ({error}): `pip install flashinfer-python`"
        raise InvalidRequest(why, field="attention") from error


def backend_for(attention: Attention, loaded: LoadedModel, block_size: int) -> AttentionBackend:
    """A GPU's own, tried here; else the reference, which a CPU's takes the place of once layers are fused. Raises
    UnsupportedModel if it computes something else, or does not run, and InvalidRequest if it cannot be had."""
    chosen = chosen_for(attention, loaded.device)
    if chosen not in ("triton", "flashinfer"):
        return ReferenceBackend()
    backend = _triton(loaded.device) if chosen == "triton" else _flashinfer(loaded)
    softcap = getattr(loaded.config, "attn_logit_softcapping", None)
    try:
        forms = forms_of(softcap, heads_of(loaded) if loaded.sinks else 0, loaded.device)
        why = differs(backend, loaded.kv_shape, heads_of(loaded), block_size, loaded.device, forms)
    except Exception as error:
        log.warning("the %s attention does not run on %s", backend.name, loaded.device, exc_info=True)
        why = f"attention does not run ({type(error).__name__})"
    if why:
        why = f"{why} on {loaded.device}; `--attention reference` serves it"
        raise UnsupportedModel(f"{name_of(loaded.config)}: {why}", field="attention")
    return backend


def heads_of(loaded: LoadedModel) -> int:
    """Of queries, on this rank."""
    return int(getattr(loaded.config, "num_attention_heads", loaded.kv_shape.kv_heads * loaded.ranks)) // loaded.ranks
