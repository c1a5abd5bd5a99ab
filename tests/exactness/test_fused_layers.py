"""Decoder layers that run as one call: which do, what they compute, and who keeps its own code."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import TOLERANCE, Rig, plain_logits
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvcpu.attention.backend import CpuBackend
from kvcpu.blocks import AttentionForm
from kvcpu.layers.layer_call import FIELDS, SCRATCH
from kvcpu.layers.modules import Multiplier, Rotary
from kvcpu.vector.team import Program
from kvfleet.worker.model.assembly import trial_logits
from kvfleet.worker.model.attention.interface import attending
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.fused.fuse import fuse
from kvfleet.worker.model.fused.layer import MOST_TOKENS, FusedLayer
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.support import trial_positions

VOCAB = 211  # the rig's
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": None, "head_dim": 32,
}  # fmt: skip
_GROUPED = _WIDE | {"num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": None,
}  # fmt: skip
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.5] * 16,
    "long_factor": [2.0] * 16,
}  # fmt: skip
_TYPES = ["sliding_attention", "full_attention"]


def _first_trained_on(length: int) -> dict[str, Any]:
    return {"original_max_position_embeddings": length}


def _ministral3(length: int) -> PreTrainedConfig:
    scaled = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    return hf.Ministral3Config(rope_parameters=scaled | _first_trained_on(length), sliding_window=None, **_GROUPED)


# How many of the two layers run as one call.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], int]] = {
    "llama": (lambda: hf.LlamaConfig(**_GROUPED), 2),
    "llama-biases": (lambda: hf.LlamaConfig(attention_bias=True, **_GROUPED), 2),
    "mistral-window": (lambda: hf.MistralConfig(sliding_window=24, **_GROUPED), 2),
    "qwen2": (lambda: hf.Qwen2Config(**_GROUPED), 2),
    "qwen2-mixed": (
        lambda: hf.Qwen2Config(use_sliding_window=True, sliding_window=24, layer_types=_TYPES, **_GROUPED),
        2,
    ),
    "gemma": (lambda: hf.GemmaConfig(hidden_act="gelu_pytorch_tanh", **_WIDE | {"num_key_value_heads": 1}), 2),
    "seed-oss": (lambda: hf.SeedOssConfig(**_GROUPED), 2),
    "gpt2": (lambda: hf.GPT2Config(**_GPT2), 2),
    "gpt2-scaled-by-layer": (lambda: hf.GPT2Config(scale_attn_by_inverse_layer_idx=True, **_GPT2), 2),
    "granite-plain": (lambda: hf.GraniteConfig(attention_multiplier=0.2, **_GROUPED), 2),
    "granite-swa": (  # with sinks
        lambda: hf.GraniteSWAConfig(attention_multiplier=0.2, sliding_window=24, layer_types=_TYPES, **_GROUPED),
        2,
    ),
    # rotations that know the length that the model was first trained on
    "yarn": (lambda: hf.LlamaConfig(rope_parameters=_YARN | _first_trained_on(32), **_GROUPED), 2),
    "longrope": (lambda: hf.LlamaConfig(rope_parameters=_LONGROPE | _first_trained_on(256), **_GROUPED), 2),
    "ministral3": (lambda: _ministral3(32), 0),  # scales its queries from there on
    "ministral3-late": (lambda: _ministral3(240), 0),
    "ministral3-beyond-the-context": (lambda: _ministral3(256), 2),
    # something else between the parts, or under their names
    "granite": (lambda: hf.GraniteConfig(attention_multiplier=0.2, residual_multiplier=0.99, **_GROUPED), 0),
    "smollm3": (lambda: hf.SmolLM3Config(no_rope_layers=[1, 0], **_GROUPED), 1),
    "ernie-4.5": (lambda: hf.Ernie4_5Config(**_GROUPED), 0),
    "qwen3": (lambda: hf.Qwen3Config(**_GROUPED), 0),
    "gemma2": (lambda: hf.Gemma2Config(**_GROUPED), 0),
    "narrow-heads": (lambda: hf.LlamaConfig(**_GROUPED | {"head_dim": 16}), 0),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_config(MODELS[name][0](), dtype=dtype).eval().requires_grad_(False)
    for weight, values in model.named_parameters():
        if weight.endswith("sinks"):
            values.normal_(1.0, 2.0)
    return model


def fused_layers(model: Any) -> list[FusedLayer]:
    return [module for module in model.modules() if isinstance(module, FusedLayer)]


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_fused_computes_the_same_in_every_kind_of_step(name: str) -> None:
    """Prompts whole and in chunks, alone and beside running streams, from the cache: steps of all sizes."""
    chance = random.Random(3)
    rig = Rig(made(name), backend=CpuBackend(), blocks=64, budget=37)
    assert len(fused_layers(rig.runner._model)) == MODELS[name][1]
    first = rig.add("first", tokens(chance, 70), 6)
    rig.add("beside", tokens(chance, 41), 30)
    rig.run()
    rig.add("second", first.ids + tokens(chance, 40), 6)
    rig.run()
    assert rig.turns["second"].cached == 75
    worst = rig.differences()
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_a_team_of_threads(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        chance = random.Random(3)
        rig = Rig(made(name), backend=CpuBackend(3), blocks=64, budget=300)
        assert fused_layers(rig.runner._model)
        for request in range(4):
            rig.add(str(request), tokens(chance, 50 * request + 20), 8)
        rig.run()
        worst = rig.differences()
        assert max(worst.values()) < TOLERANCE, worst
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_another_backend_attends_between_the_halves(name: str) -> None:
    chance = random.Random(3)
    plain = made(name)
    rig = Rig(plain, backend=CpuBackend(), blocks=64)
    assert fused_layers(rig.runner._model)
    rig.runner._backend = ReferenceBackend()
    rig.add("first", tokens(chance, 70), 6)
    rig.run()
    worst = rig.differences()
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("name", [name for name, (_, layers) in MODELS.items() if layers])
def test_in_bfloat16_it_errs_no_more_than_before(name: str) -> None:
    model = made(name, torch.bfloat16)
    loaded = adopt_model(copy.deepcopy(model))
    before = trial_logits(loaded, 16).double()
    assert fuse(loaded.model, Multiplier(1), lambda: trial_logits(loaded, 16))["layers"] == MODELS[name][1]
    after = trial_logits(loaded, 16).double()
    ids = [VOCAB * (at + 1) // (len(before) + 1) for at in range(len(before))]
    exact = plain_logits(copy.deepcopy(model).double(), ids, trial_positions(loaded.config, loaded.context_length))
    assert (after - exact).abs().mean() <= 1.2 * (before - exact).abs().mean()


# ---------------------------------------------------------------------------------------------- impostors


class Impostor(LlamaDecoderLayer):
    """Takes the place of a layer of a model, with its parts."""

    def __init__(self, layer: LlamaDecoderLayer) -> None:
        torch.nn.Module.__init__(self)
        for name, child in layer.named_children():
            setattr(self, name, child)


class Scaled(Impostor):
    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return super().forward(hidden_states, *others, **more) * 1.001


class Parallel(Impostor):
    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        out: Tensor = hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))
        return out


class NormedResidual(Impostor):
    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return super().forward(self.input_layernorm(hidden_states), *others, **more)


class Tuple(Impostor):
    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return (super().forward(hidden_states, *others, **more), None)  # type: ignore[return-value]


class Shy(Impostor):
    """Bears to be called once only."""

    called = False

    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        if self.called:
            raise RuntimeError("again?")
        self.called = True
        return super().forward(hidden_states, *others, **more)


class Twice(Impostor):
    """Attends twice."""

    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        self.self_attn(hidden_states=hidden_states, **more)
        return super().forward(hidden_states, *others, **more)


class ScaledLate(Impostor):
    """From a position on that no setting names."""

    def forward(self, hidden_states: Tensor, *others: Any, position_ids: Tensor, **more: Any) -> Tensor:
        out = super().forward(hidden_states, *others, position_ids=position_ids, **more)
        return torch.where(position_ids[..., None] >= 200, 1.001 * out, out)


@pytest.mark.parametrize("kind", [Impostor, Scaled, Parallel, NormedResidual, Tuple, Shy, Twice, ScaledLate])
def test_impostors_keep_their_code(kind: type[Impostor]) -> None:
    """`Impostor` itself is the control: it computes what it seems to."""
    loaded = adopt_model(made("llama"))
    impostor = kind(copy.deepcopy(loaded.model.model.layers[1]))

    def run() -> None:
        """The first layer is what it seems; the other is called the same way, but the model would not bear it."""
        first = loaded.model.model.layers[0]
        hook = first.register_forward_pre_hook(call_the_other, with_kwargs=True)
        try:
            trial_logits(loaded, 16)
        finally:
            hook.remove()

    def call_the_other(_: Any, inputs: Any, keywords: Any) -> None:
        with attending(Silent()):
            impostor(*inputs, **keywords)

    loaded.model.add_module("other", impostor)
    found = fuse(loaded.model, Multiplier(1), run)["layers"]
    if kind is Impostor:
        assert found == 3
    else:
        assert found == 2
        assert loaded.model.other is impostor


class Silent:
    """An AttentionStep that attends to nothing."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        return torch.zeros_like(query)


# ---------------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("name", ["llama", "gpt2", "smollm3"])
def test_layers_next_to_one_another_run_together_in_small_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(made(name), backend=CpuBackend(), blocks=64)
    runs: list[int] = []
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda program: (runs.append(len(program._table)), run(program))[1])
    rig.add("r", tokens(random.Random(1), MOST_TOKENS + 1), 3)
    rig.step()
    layers = len(fused_layers(rig.runner._model))
    assert len(runs) == layers, "one by one in a large step"
    runs.clear()
    rig.step()
    assert len(runs) == 1
    assert runs[0] >= 9 * layers
    rig.run()
    assert max(rig.differences().values()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("detour", ["another-object", "changed", "skipped", "twice"])
def test_a_model_that_does_something_between_its_layers_gets_what_it_asks_for(name: str, detour: str) -> None:
    """As computed by layers that know of no chain, after a prompt of its own."""

    class Detour(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, *others: Any, **more: Any) -> Tensor:
            if detour == "skipped":
                return x * 1.5
            if detour == "twice":
                x = self.layer(x, *others, **more)
            if detour == "changed":
                x = x + 0.25
            if detour == "another-object":
                x = x.clone()
            out: Tensor = self.layer(x, *others, **more)
            return out

    found = []
    for chained in (True, False):
        torch.manual_seed(5)
        rig = Rig(made(name), backend=CpuBackend(), blocks=64)
        layers = fused_layers(rig.runner._model)
        assert all(layer.chain for layer in layers)
        holder = next(m for m in rig.runner._model.modules() if isinstance(m, torch.nn.ModuleList))
        holder[1] = Detour(layers[1])
        if not chained:
            for layer in layers:
                layer.chain = None
        rig.add("r", tokens(random.Random(1), 20), 6)
        rig.run()
        found.append(torch.stack([rig.logits["r"][at] for at in range(25)]))
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_rotations_of_two_sizes_do_not_take_each_other_s_memory() -> None:
    """Call blocks keep pointing into it."""
    rotary = Rotary(1)
    small, large = (np.zeros(FIELDS, dtype=np.int64) for _ in range(2))
    for block, size in ((small, 32), (large, 64), (small, 32)):
        heads = torch.zeros(1, 2, 3, size)
        before = int(block[SCRATCH])
        rotary.lay_out(block, heads, heads)
        assert block[SCRATCH] == before or not before
    kept = {array.ctypes.data for array in rotary._scratch.values()}
    assert {int(small[SCRATCH]), int(large[SCRATCH])} == kept


# ---------------------------------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused_loudly() -> None:
    rig = Rig(made("llama"), backend=CpuBackend())
    layer = fused_layers(rig.runner._model)[0]
    for x in (torch.zeros(1, 3, 64), torch.zeros(2, 3, 128), torch.zeros(1, 3, 128, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="given to a layer"), attending(Silent()):
            layer(x, position_embeddings=(torch.zeros(1, 3, 32), torch.zeros(1, 3, 32)))
    for angles in (torch.zeros(1, 4, 32), torch.zeros(1, 3, 16), torch.zeros(1, 3, 32).bfloat16()):
        with pytest.raises(ValueError, match="rotation"), attending(Silent()):
            layer(torch.zeros(1, 3, 128), position_embeddings=(angles, angles))


def test_a_layer_keeps_what_models_look_at() -> None:
    model = made("qwen2-mixed")
    before = [layer.hidden_size for layer in model.model.layers]
    rig = Rig(model, backend=CpuBackend())
    assert [layer.hidden_size for layer in fused_layers(rig.runner._model)] == before
