"""What a process shows: metrics that exist from the start at 0, probes, and logs as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvproto.errors import Unavailable
from kvservice.logs import JsonFormatter
from kvservice.metrics import LiveCollector, MetricsServer, Reading


def registry(count: dict[str, float]) -> CollectorRegistry:
    made = CollectorRegistry()
    readings = [
        Reading("kvfleet_things_total", "things", lambda: count["n"]),
        Reading("kvfleet_depth_tokens", "depth", lambda: 2.5),
        Reading("kvfleet_by_tier_bytes", "per tier", labels=("tier",), read_labelled=lambda: {("device",): 3.0}),
    ]
    made.register(LiveCollector(readings))
    return made


def test_readings_are_live() -> None:
    count = {"n": 0.0}
    made = registry(count)
    assert b"kvfleet_things_total 0.0" in generate_latest(made)
    count["n"] = 5
    text = generate_latest(made)
    assert b"kvfleet_things_total 5.0" in text
    assert b"# TYPE kvfleet_depth_tokens gauge" in text
    assert b'kvfleet_by_tier_bytes{tier="device"} 3.0' in text


async def test_probes_and_a_port_in_use() -> None:
    ready = False
    server = MetricsServer(registry({"n": 1.0}), "127.0.0.1", 0, lambda: ready)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200
            assert (await http.get("/readyz")).status_code == 503
            ready = True
            assert (await http.get("/readyz")).status_code == 200
            assert "kvfleet_things_total 1.0" in (await http.get("/metrics")).text
            assert (await http.get("/other")).status_code == 404
        with pytest.raises(Unavailable, match="cannot listen"):
            MetricsServer(registry({"n": 1.0}), "127.0.0.1", server.port, lambda: True)
    finally:
        await server.close()


def test_json_logs_carry_the_request() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "hello %s", "args": ("you",), "request": "r1"}
    )
    line = json.loads(JsonFormatter("worker-w0").format(record))
    assert (line["message"], line["request"], line["service"], line["level"]) == (
        "hello you",
        "r1",
        "worker-w0",
        "info",
    )
    assert line["time"].endswith("Z")


async def test_a_silent_connection_blocks_neither_probes_nor_the_end() -> None:
    server = MetricsServer(registry({"n": 1.0}), "127.0.0.1", 0, lambda: True)
    with socket.create_connection(("127.0.0.1", server.port)):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as http:
            assert (await http.get("/livez")).status_code == 200
        async with asyncio.timeout(2):
            await server.close()
