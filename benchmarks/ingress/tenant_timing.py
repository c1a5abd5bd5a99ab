"""Whether the time to the first token tells a tenant what another one has asked: `value` is how well it tells.

One worker with the bundled model behind an ingress with two tenants' keys. For each of many prompts tenant A asks until
it is warm; then, in random order, A asks again (warm), B asks for the same (after A), B asks for the same words in
another order (cold), each timed from sending to the first token. The value is the chance that an after-A time is
shorter than a cold one (the area under the ROC curve of a spy who judges by time): 0.5 tells nothing. As a control the
same of warm against cold, which must be plain to see, else the measurement is blind. `fed` are the tokens computed for
B's requests.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import httpx

from benchmarks.harness.report import finish, parse_quick, progress
from tests.support import sse
from tests.support.up import Up

KEYS = {"a": "sk-tenant-a", "b": "sk-tenant-b"}
WORDS = ("king", "castle", "wind", "door", "night", "again", "who", "where", "light", "sword", "ship", "crown")
UNIT = "chance that B after A is faster than B cold; 0.5 tells nothing"
LENGTH = 300  # words of a prompt
CONTROL = 0.95
BLOCK = 16


def auc(first: list[float], second: list[float]) -> float:
    """Chance that one of the first is shorter than one of the second."""
    pairs = [(one < other) + 0.5 * (one == other) for one in first for other in second]
    return sum(pairs) / len(pairs)


def prompts_of(chance: random.Random, length: int) -> tuple[str, str]:
    """One, and the same words in another order: as many tokens, nothing in common from the second block on."""
    words = [chance.choice(WORDS) for _ in range(length)]
    return " ".join(words), " ".join([words[0], *chance.sample(words[1:], length - 1)])


def timed(http: httpx.Client, tenant: str, prompt: str) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and the start event."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    start: dict[str, Any] = {}
    took = math.nan
    began = time.perf_counter()
    with http.stream("POST", "/generate", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode())
        for line in sse.lines(answer):
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "start":
                start = event
            elif event["type"] == "token" and math.isnan(took):
                took = time.perf_counter() - began
    return took, start


def fed(http: httpx.Client) -> int:
    """Tokens that the fleet has computed, as of now: heartbeats bring it."""
    headers = {"Authorization": f"Bearer {KEYS['a']}"}
    seen, same = -1, 0
    while same < 8:
        total: int = http.get("/stats", headers=headers).json()["load"]["fed_tokens_total"]
        same, seen = (same + 1, seen) if total == seen else (0, total)
        time.sleep(0.15)
    return seen


def computed_for_b(http: httpx.Client, chance: random.Random, length: int) -> dict[str, int]:
    """Of a prompt that A has warmed, and of another as long."""
    shared, fresh = prompts_of(chance, length)
    for _ in range(2):
        timed(http, "a", shared)
    counts = {}
    for what, prompt in (("after_a", shared), ("cold", fresh)):
        before = fed(http)
        timed(http, "b", prompt)
        counts[what] = fed(http) - before
    return counts


def measure(http: httpx.Client, rounds: int, length: int) -> tuple[dict[str, list[float]], int]:
    """Times of each kind, and the most tokens that were cached for B."""
    chance = random.Random(7)
    times: dict[str, list[float]] = {"warm": [], "after_a": [], "cold": []}
    cached = 0
    for number in range(rounds):
        shared, fresh = prompts_of(chance, length)
        for _ in range(2):
            timed(http, "a", shared)
        order = [("warm", "a", shared), ("after_a", "b", shared), ("cold", "b", fresh)]
        chance.shuffle(order)
        for kind, tenant, prompt in order:
            took, start = timed(http, tenant, prompt)
            times[kind].append(took)
            if tenant == "b":
                cached = max(cached, start["cached_tokens"])
        if number % 10 == 9:
            progress(f"{number + 1} of {rounds}")
    return times, cached


def run(name: str, *flags: str, quick: bool, length: int = LENGTH, env: dict[str, str] | None = None) -> NoReturn:
    """Of one worker that `kvfleet up` starts with these flags."""
    rounds = 15 if quick else 60
    keys = [
        {"name": tenant, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "admin": tenant == "a"}
        for tenant, key in KEYS.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.json"
        file.write_text(json.dumps({"keys": keys}))
        usual = ("--port", "0", "--workers", "1", "--dtype", "float32", "--api-keys-file", str(file))
        fleet = Up(*usual, *flags, env=env)
        try:
            fleet.wait_ready(300)
            with httpx.Client(base_url=fleet.base, timeout=60, trust_env=False) as http:
                counts = computed_for_b(http, random.Random(3), length)
                times, cached = measure(http, rounds, length)
        finally:
            fleet.stop()
    told, control = auc(times["after_a"], times["cold"]), auc(times["warm"], times["cold"])
    noise = 3 * math.sqrt((2 * rounds + 1) / (12 * rounds * rounds))  # three deviations of what tells nothing
    medians: dict[str, Any] = {
        f"{kind}_ttft_ms": round(1000 * statistics.median(taken), 2) for kind, taken in times.items()
    }
    spread = max(counts.values()) - min(counts.values())
    finish(
        name,
        round(told, 3),
        UNIT,
        floor=round(0.5 + noise, 3),
        ok=abs(told - 0.5) <= noise and control >= CONTROL and cached < BLOCK,
        control=round(control, 3),
        after_a_over_cold=round(statistics.median(times["after_a"]) / statistics.median(times["cold"]), 3),
        most_cached_for_b=cached,
        fed=counts,
        fed_difference=spread,
        rounds=rounds,
        **medians,
    )


if __name__ == "__main__":
    run("tenant_timing", "--vaults", "1", quick=parse_quick(__doc__))
