"""Settings of a vault process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvservice.data_plane import DataPlaneSettings
from kvservice.host import free_bytes

FRACTION = 0.25
MOST_BYTES = 8 * 2**30
LEAST_BYTES = 64 * 2**20


class VaultSettings(DataPlaneSettings):
    """Any number of vaults share a fleet's blocks, by runs of each chain."""

    max_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for blocks and all that belongs to them; default: a quarter of what is free, 8 GiB",
    )
    state_max_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for recurrent states of hybrid models, beside that; default: an eighth as much",
    )
    vaults_on_host: int = Field(1, ge=1, description="how many vaults share that default")
    disk_dir: Path | None = Field(
        None, description="keep what memory has no room for in this folder, over restarts too"
    )
    disk_max_bytes: int = Field(16 * 2**30, ge=1, description="of the files there")
    state_disk_max_bytes: int | None = Field(
        None, ge=1, description="of files with states, beside those; default: a sixteenth as much"
    )
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")


def default_max_bytes() -> int:
    return max(LEAST_BYTES, min(MOST_BYTES, int(free_bytes() * FRACTION)))
