"""Settings of a vault process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvservice.settings import ServiceSettings


class VaultSettings(ServiceSettings):
    """Any number of vaults share a fleet's blocks, by runs of each chain."""

    max_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for blocks and all that belongs to them; default: a quarter of what is free, 8 GiB",
    )
    vaults_on_host: int = Field(1, ge=1, description="how many vaults share that default")
    disk_dir: Path | None = Field(
        None, description="keep what memory has no room for in this folder, over restarts too"
    )
    disk_max_bytes: int = Field(16 * 2**30, ge=1, description="of the files there")
    data_plane_host: str = Field("127.0.0.1", description="address to serve blocks on")
    data_plane_port: int = Field(0, ge=0, le=65535, description="its port; 0: any")
    data_plane_advertise: str | None = Field(
        None,
        description="host that others reach it at; default: the address, or this host's name if that is all of them",
    )
    runtime_dir: Path | None = Field(
        None, description="folder for its Unix socket, this user's alone; default: a temporary one"
    )
    data_plane_cert: Path | None = Field(None, description="certificate: serve TCP by TLS")
    data_plane_key: Path | None = Field(None, description="its key")
    data_plane_ca: Path | None = Field(None, description="CA file: clients must show a certificate")
    prestart_s: float = Field(10.0, ge=0, description="how long to wait for the buckets at start")
