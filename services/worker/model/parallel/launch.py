"""Starts a group: refuses what cannot be cut, starts the followers, and builds the leader's runner. Wiring."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvfleet.worker.model.kv_size import KvLayout, size_lines
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.loader import LoadedModel, device_of, read_config
from kvfleet.worker.model.parallel.group import STEP_LIMIT_S, RankGroup
from kvfleet.worker.model.parallel.messages import RankPlan
from kvfleet.worker.model.parallel.rank import build_rank
from kvfleet.worker.model.parallel.runner import GroupRunner
from kvfleet.worker.model.parallel.sharding import UNCUT, unknown_styles
from kvfleet.worker.model.probe import layout_of
from kvfleet.worker.model.support import name_of, refusal, supported_context
from kvproto.errors import InvalidRequest, UnsupportedModel

log = logging.getLogger(__name__)


def start_group(plan: RankPlan, limit_s: float = STEP_LIMIT_S, *, progress: LoadProgress | None = None) -> GroupRunner:
    """`limit_s`: how long a step may take. `progress` is told of the leader's part. Raises
    UnsupportedModel, InvalidRequest, OutOfMemory or EngineFailure."""
    _check_devices(plan)
    _check_model(plan)
    group = RankGroup(plan, limit_s)
    try:
        begin = group.meet()
        with group.watched(loading=True):
            runner = build_rank(begin, partial(GroupRunner, group), partial(_tell, plan), progress)
        group.met()
    except BaseException:
        group.close()
        raise
    assert isinstance(runner, GroupRunner)
    return runner


def _check_devices(plan: RankPlan) -> None:
    if device_of(plan.device).type == "cuda" and torch.cuda.device_count() < plan.ranks:
        why = f"{plan.ranks} cards are asked for, and {torch.cuda.device_count()} are there"
        raise InvalidRequest(why, field="tensor_parallel_size")


def _check_model(plan: RankPlan) -> None:
    config = read_config(plan.folder)
    context = supported_context(config)
    layout = layout_of(config, context)
    if layout.parts == 1:
        raise refusal(config, "tensor parallelism of latent attention", UNCUT)
    styles = _tp_plan(config)
    if not styles:
        raise refusal(config, "tensor parallelism without a plan of transformers (`tp_plan`)", UNCUT)
    if unknown := unknown_styles(styles):
        raise refusal(config, f"a tensor-parallel plan with {', '.join(unknown)}", UNCUT)
    heads = layout.kv_heads
    if heads % plan.ranks:
        raise refusal(config, f"cutting {heads} heads of keys and values into {plan.ranks} equal parts", UNCUT)


def _tp_plan(config: Any) -> dict[str, str]:
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        except ValueError as error:
            raise UnsupportedModel(f"{name_of(config)}: {error}", field="model") from error
    return dict(model.tp_plan or {})


def _tell(plan: RankPlan, loaded: LoadedModel, blocks: int) -> None:
    shape = loaded.kv_shape
    layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, loaded.context_length, loaded.window, shape.parts)
    kv_dtype = "int8" if shape.quantized else str(shape.dtype).removeprefix("torch.")
    for line in size_lines(layout, plan.block_size, kv_dtype, blocks):
        log.info("of each of %d ranks: %s", plan.ranks, line)
