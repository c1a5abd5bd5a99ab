"""Settings of a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from kvservice.data_plane import DataPlaneSettings


class WorkerSettings(DataPlaneSettings):
    """One worker serves one model; several workers with different models make one fleet."""

    engine: Literal["own", "vllm"] = Field("own", description="vllm: a vLLM server beside this worker, at engine_url")
    engine_url: str = Field("http://127.0.0.1:8000", description="of that vLLM server")
    model: str = Field("demo", description="demo, a Hugging Face folder, or a hub id")
    served_model_name: str | None = Field(None, description="name that clients use; default: the model's own")
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="prefill: prompts alone, which go on at others after their first token; decode: what comes "
        "after, and prompts that are not worth the move; where the other half is missing, each serves all"
    )  # fmt: skip
    tool_format: Literal["hermes", "llama", "mistral", "pythonic", "deepseek", "harmony"] | None = Field(
        None, description="how the model writes tool calls; default: as its chat template says"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights from config.json")
    runner: Literal["torch", "fake"] = Field(
        "torch", description="fake: a deterministic model without torch, for tests"
    )
    fake_tokens_per_s: float = Field(0.0, ge=0, description="speed of the fake runner; 0: unlimited")
    fake_prefill_tokens_per_s: float = Field(0.0, ge=0, description="the same for prompts")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int = Field(16, ge=1, le=256)
    blocks: int | None = Field(None, ge=2, description="KV blocks on the device; default: from free memory")
    kv_memory_fraction: float | None = Field(
        None, gt=0, le=0.95, description="share of free memory for KV blocks; default: 0.3, and on a GPU 0.9 of what "
        "the largest step leaves"
    )  # fmt: skip
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto", description="KV on the device; int8 holds about twice the sequences"
    )
    eviction: Literal["lru", "reuse"] = Field(
        "lru",
        description="which cached block goes first: the least recently used, or the one that saves least",
    )
    host_bytes: int | None = Field(
        None, ge=0, description="host memory for KV blocks below the device; 0: none; default: from free memory"
    )
    host_memory_fraction: float = Field(0.1, gt=0, le=0.9, description="share of free host memory for KV blocks")
    host_state_bytes: int | None = Field(
        None,
        ge=0,
        description="host memory for a hybrid model's snapshots; 0: none; default: a third of that for blocks",
    )
    state_every: int = Field(
        32, ge=1, description="blocks of a prompt between two snapshots of a hybrid model's recurrent state"
    )
    states: int | None = Field(
        None, ge=2, description="recurrent states of a hybrid model, of running sequences and snapshots; default: a "
        "third of the memory for K and V, at most 4 x slots"
    )  # fmt: skip
    vault_codec: Literal["raw", "int8"] = Field(
        "raw", description="how blocks are written to vaults; int8 takes a quarter of fp32 and is not exact"
    )
    preload_s: float = Field(5.0, ge=0, description="how long a new worker fetches prefixes in demand; 0: it does not")
    attention: Literal["auto", "cpu", "triton", "flashinfer", "reference"] = Field(
        "auto",
        description="attention kernels: cpu on a CPU; triton, or flashinfer if installed, on a GPU; reference: plain "
        "torch",
    )
    enforce_eager: bool = Field(False, description="on a GPU, do not record decode steps as CUDA graphs")
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="cards of this host, or processes on a CPU, that share the model's heads"
    )
    slots: int = Field(256, ge=1, description="most sequences that run at once")
    waiting: int = Field(1024, ge=1, description="most requests that wait; more are refused as retryable")
    max_producer_priority: int = Field(
        0, ge=-100, le=100, description="highest priority of a request that neither ingress nor placement sends: more "
        "is cut down to it"
    )  # fmt: skip
    step_tokens: int = Field(2048, ge=1, description="most tokens of one step")
    itl_target_ms: float = Field(
        0.0, ge=0, description="how long a step beside running streams may take; 0: 2.5 times one without new prompts"
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the model; default: cores / workers on the host"
    )
    workers_on_host: int = Field(1, ge=1, description="how many workers share this host's cores")
    fleet_key: str = Field(
        "", description="secret from which tenants' cache salts are derived; equal in all processes", repr=False
    )
    fleet_key_file: Path | None = Field(None, description="file that holds it")
    public_prefixes_file: Path | None = Field(
        None, description="JSON list of texts (a rendered system prompt, with its BOS) whose cache all tenants share"
    )
    drain_s: float = Field(8.0, ge=0, description="how long SIGTERM waits for running sequences")
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")
