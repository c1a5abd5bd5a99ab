"""A worker starts without torch's compiler, and the compiler is whole for those who ask for it."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys
from kvfleet.worker.model.quick_imports import defer_compiler
defer_compiler()
from kvfleet.worker.model.loader import load_model
from kvfleet.worker.model.model_folder import resolve_model
model = load_model(resolve_model("demo")).model
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", LOADED + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_loaded_without_the_compiler() -> None:
    heavy = "'torch._dynamo.utils', 'torch._inductor', 'torch.distributed.tensor', 'sympy.core', 'torch._decomp'"
    assert run(f"print([name for name in ({heavy}) if name in sys.modules])") == "[]\n"


def test_whoever_asks_for_the_compiler_has_all_of_it() -> None:
    code = """
import sympy, torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=True)
print(compiled(torch.ones(2)).tolist(), compiled(torch.ones(3)).tolist(), sympy.Symbol("x") + 1)
"""
    assert run(code) == "[2.0, 2.0] [2.0, 2.0, 2.0] x + 1\n"


def test_numbers_on_no_device_are_what_torch_says() -> None:
    code = """
import torch
with torch.device("meta"):
    halves = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float) / 8))
    both = torch.nn.Linear(3, 5).weight * torch.ones(5, 1)
print(tuple(halves.shape), tuple(both.shape), both.dtype)
try:
    torch.empty(2, 3, device="meta") * torch.empty(4, 3, device="meta")
except RuntimeError as error:
    print("refused")
"""
    assert run(code) == "(4,) (5, 3) torch.float32\nrefused\n"


def test_an_operator_that_is_missing_on_no_device_is_there_at_the_second_try() -> None:
    """Loading tries again; whoever names the module has it at once."""
    code = """
import torch
from kvfleet.worker.model import loader, quick_imports

def needs_more(*_):
    with torch.device("meta"):
        return torch.nn.functional.grid_sample(torch.ones(1, 1, 4, 4), torch.ones(1, 4, 4, 2))

try:
    needs_more()
    print("there")
except NotImplementedError:
    print("missing")
whole, tries = loader._trained_model, []
def trained(*asked):
    tries.append(needs_more().shape)
    return whole(*asked)
loader._trained_model = trained
load_model(resolve_model("demo"))
print(len(tries), quick_imports.load_meta(), torch._meta_registrations.__name__)
"""
    assert run(code) == "missing\n1 False torch._meta_registrations\n"
