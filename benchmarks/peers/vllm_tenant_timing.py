"""As `tenant_timing`, with a real vLLM as the worker's engine: whether its time to the first token tells a tenant what
another one has asked, where the tenant's root is vLLM's cache_salt."""

from __future__ import annotations

from benchmarks.harness.report import parse_quick
from benchmarks.ingress.tenant_timing import UNIT, run
from benchmarks.peers._vllm_servers import need_vllm
from tests.support.vllm_server import ENV, vllm_python

NAME, FLOOR = "vllm_tenant_timing", 0.5
LENGTH = 1000  # words: what vLLM needs beside the prompt's computation varies more than all that a worker of ours does

if __name__ == "__main__":
    quick = parse_quick(__doc__)
    need_vllm(NAME, UNIT, FLOOR)
    flags = ("--engine", "vllm", "--engine-python", vllm_python(), "--", "--enforce-eager", "--max-model-len", "2048")
    run(NAME, *flags, quick=quick, length=LENGTH, env=ENV)
