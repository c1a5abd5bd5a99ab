"""The page's timeline in a real Chromium: streams that move, workers that die and drain, who holds blocks, first
steps."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import pytest

from kvproto.messages import State
from kvproto.subjects import Subjects
from tests.integration.ingress.ingress_rig import Served, serve, until
from tests.support.browser import Browser
from tests.support.page_fleet import EVIL, FLEET_KEY, GO_ON, KEYS, PageFleet

# A stream that moved and then lost its worker, one that failed, one long ago; what two workers did.
DRAWN = """
(async () => {
  const { drawn, phasesOf } = await import(new URL('/dashboard/spans.js', location.href));
  const stay = (worker_id, placed_unix_ms, started_unix_ms, first_token_unix_ms, ended_unix_ms, end) =>
    ({ worker_id, placed_unix_ms, started_unix_ms, first_token_unix_ms, ended_unix_ms, end, output_tokens: 5 });
  const streams = [
    { stays: [stay('w0', 1100, 1200, 1300, 1500, 'moved'), stay('w1', 1500, 1500, 1550, 1700, 'lost'),
              stay('w0', 1800, null, null, null, null)] },
    { stays: [stay('w0', 1000, null, null, 1100, 'deadline_exceeded')] },
    { stays: [stay('w0', 10, 20, 30, 40, 'done')] },
  ];
  const workers = [['w0', 'joined', 500], ['w1', 'died', 1700], ['w0', 'draining', 1850], ['w0', 'drained', 1950]]
    .map(([worker_id, what, unix_ms]) => ({ worker_id, what, unix_ms }));
  const most = { mostStreams: 1, mostWorkers: 9 };
  return { seen: drawn({ streams, workers }, 1000, 2000, most), all: drawn({ streams, workers }, 0, 2000, most).hidden,
           unheard: phasesOf(stay('w0', 5, null, null, null, 'done'), 100) };
})()
"""
# WCAG's contrast of the colours that are drawn against the sheet, of the letters upon one, of text that is new.
CONTRASTS = """
(() => {
  const luminance = (rgb) => {
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement('span'));
  const rgb = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(rgb(one)), luminance(rgb(other))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const drawn = ['blue', 'green', 'orange', 'pink', 'grey', 'bad', 'warn', 'ready'];
  const found = Object.fromEntries(drawn.map((name) => [name, contrast(name, 'sheet')]));
  found.letters = contrast('on-colour', 'blue') - 1.5;
  found.quiet = contrast('quiet', 'ground') - 1.5;
  probe.remove();
  return found;
})()
"""

WIDTHS = """
['device', 'computed'].map((name) =>
  parseFloat(document.querySelector(`#turns .turn:nth-child(4) .${name}`).style.width))
"""
CHOOSE_DEMO = """
(() => {
  const chosen = document.querySelector('#ledger-model');
  chosen.value = 'demo';
  chosen.dispatchEvent(new Event('change'));
})()
"""
DIALOG = """
(({ left, right }) => [left, right])(document.querySelector('#drain-dialog').getBoundingClientRect())
"""
STAYS = """
[...document.querySelectorAll('#stays tbody tr')].map((row) =>
  ['worker', 'end'].map((name) => row.querySelector(`[data-column=${name}]`).textContent))
"""


@pytest.fixture
async def pair(fleet: PageFleet) -> PageFleet:
    """A second worker of the model `demo`, to which streams can move."""
    await fleet.workers.start("w2", fleet_key=FLEET_KEY, fake_tokens_per_s=200.0)
    return fleet


def talk(browser: Browser, url: str, tokens: int) -> None:
    """Begin a long answer in the chat."""
    browser.open(f"{url}/")
    browser.until_text("#status", "Live")
    browser.run(GO_ON)
    browser.run("document.querySelector('#chat-model').value = 'demo'")
    browser.run(f"document.querySelector('#chat-max').value = {tokens}")
    browser.type("#said", "Who goes there? " * 8)
    browser.press("Enter")
    browser.until_text("#turns .turn:last-child .quiet", "TTFT")


def holder(fleet: PageFleet) -> str:
    running = [
        name for name, one in fleet.workers.workers.items() if not one.dead and one.thread.engine.scheduler.running
    ]
    (name,) = running
    return name


def stays(browser: Browser) -> list[tuple[str, str]]:
    """Worker and end, as the table tells them, newest stream first."""
    return [tuple(one) for one in browser.run(STAYS)]


def open_text(browser: Browser) -> None:
    """As from the keyboard."""
    browser.run("document.querySelector('#timeline-text summary').focus()")
    browser.press("Enter")
    browser.until(lambda: browser.run("document.querySelector('#timeline-text').open"))


def labels(browser: Browser) -> list[str]:
    return list(browser.run("[...document.querySelectorAll('.course.stream .label')].map((one) => one.textContent)"))


async def test_what_it_computes(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def compute() -> Any:
        browser.open(f"{served.url}/")
        return browser.run(DRAWN)

    got = await asyncio.to_thread(compute)
    (stream,) = got["seen"]["streams"]
    assert [(one["phase"], one["worker"], one["begin"], one["end"]) for one in stream["spans"]] == [
        ("queue", "w0", 0.1, 0.2), ("prefill", "w0", 0.2, 0.3), ("decode", "w0", 0.3, 0.5),
        ("prefill", "w1", 0.5, 0.55), ("decode", "w1", 0.55, 0.7), ("wait", "", 0.7, 0.8), ("queue", "w0", 0.8, 1),
    ]  # fmt: skip
    assert stream["marks"] == [{"at": 0.5, "kind": "moved"}, {"at": 0.8, "kind": "lost"}]
    assert (stream["workers"], stream["runs"]) == (["w0", "w1", "w0"], True)
    assert (got["seen"]["hidden"], got["all"], got["unheard"]) == (1, 2, [])
    w0, w1 = got["seen"]["workers"]
    assert [(one["life"], one["begin"], one["end"]) for one in w0["lives"]] == [
        ("up", 0, 0.85), ("draining", 0.85, 0.95), ("gone", 0.95, 1),
    ]  # fmt: skip
    assert [(one["life"], one["begin"], one["end"]) for one in w1["lives"]] == [("up", 0, 0.7), ("gone", 0.7, 1)]
    assert [one["kind"] for one in (*w0["marks"], *w1["marks"])] == ["draining", "drained", "died"]
    assert got["seen"]["lines"] == [{"at": 0.7, "kind": "died"}, {"at": 0.95, "kind": "drained"}]


async def test_a_worker_is_drained_by_the_button_and_its_stream_ends_whole(browser: Browser, pair: PageFleet) -> None:
    served = await pair.serve()
    await asyncio.to_thread(talk, browser, served.url, 900)
    leaving = holder(pair)
    other = {"w0": "w2", "w2": "w0"}[leaving]

    def press(*buttons: str) -> None:
        for one in buttons:
            browser.run(f"document.querySelector({json.dumps(one)}).click()")

    def ask() -> None:
        button = f"button[aria-label='Drain {leaving}']"
        press(button)
        assert browser.text("#drain-title") == f"Drain {leaving}?"
        assert "its 1 running and 0 waiting streams, and ends. 1 other ready worker serves demo." in browser.text(
            "#drain-what"
        )
        assert browser.run("document.activeElement.id") == "drain-no", "Enter alone drains nobody"
        press("#drain-no")
        assert browser.run("document.querySelector('#drain-dialog').open") is False
        press(button)

    await asyncio.to_thread(browser.until_text, "#workers", "\t1\t0\t")
    await asyncio.to_thread(ask)
    assert pair.workers.workers[leaving].loop.state is State.READY
    await asyncio.to_thread(press, "#drain-yes")
    await until(lambda: pair.workers.workers[leaving].loop.state is State.DRAINING)
    await pair.workers.workers[leaving].stop()  # as its process does

    def look() -> None:
        browser.until(lambda: f"{leaving}→{other}" in labels(browser))
        browser.until_text("#turns .turn:last-child .quiet", "900 generated")
        assert browser.text("#turns .turn:last-child .quiet").endswith(other)
        open_text(browser)
        browser.until(lambda: stays(browser)[:2] == [(leaving, "moved"), (other, "done")])
        browser.until_text("#moments", f"{leaving} had drained")
        assert f"{leaving} began to drain" in browser.text("#moments")
        for mark in (".stream .mark.moved", ".worker .mark.draining", ".worker .mark.drained", ".stream .line.drained"):
            assert browser.run(f"document.querySelectorAll('#timeline {mark}').length"), mark
        assert browser.run("document.querySelector('#timeline').getAttribute('aria-hidden')") == "true"
        assert browser.run(f"document.querySelector(\"button[aria-label='Drain {leaving}']\").disabled")
        browser.until_text("#holders-list", f"{other} had the last turn")  # it looked again, as a worker has gone

    await asyncio.to_thread(look)
    assert browser.problems == []


async def test_a_worker_that_died_is_marked(browser: Browser, pair: PageFleet) -> None:
    served = await pair.serve()
    await asyncio.to_thread(talk, browser, served.url, 600)
    killed = holder(pair)
    other = {"w0": "w2", "w2": "w0"}[killed]
    await pair.workers.workers[killed].kill()

    def look() -> None:
        browser.until_text("#turns .turn:last-child .quiet", "600 generated")
        open_text(browser)
        browser.until(lambda: stays(browser)[:2] == [(killed, "lost"), (other, "done")])
        browser.until_text("#moments", f"{killed} died")
        assert f"{killed}→{other}" in labels(browser)
        for mark in (".stream .mark.lost", ".worker .mark.died", ".stream .line.died"):
            assert browser.run(f"document.querySelectorAll('#timeline {mark}').length"), mark

    await asyncio.to_thread(look)


async def test_a_drain_that_is_refused_is_said_so(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def ask() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#workers", "w1")
        browser.run("document.querySelector(\"button[aria-label='Drain w1']\").click()")
        assert f"It is the last ready worker of {EVIL}" in browser.text("#drain-last")

    def drain() -> None:
        browser.run("document.querySelector('#drain-yes').click()")
        browser.until_text("#drain-problem", "worker w1 ")  # is not there any more, or does not answer
        assert browser.run("document.querySelector('#drain-yes').disabled") is False

    await asyncio.to_thread(ask)
    await fleet.workers.workers["w1"].kill()
    await asyncio.to_thread(drain)


async def test_bars_say_where_tokens_came_from_and_who_holds_them(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def look() -> tuple[list[float], str, int, str]:
        talk(browser, served.url, 24)
        browser.until_text("#turns .turn:last-child .quiet", "24 generated")
        browser.type("#said", "And then?")
        browser.press("Enter")
        browser.until_text("#turns .turn:nth-child(4) .quiet", "24 generated")
        turn = browser.text("#turns .turn:nth-child(4)")
        prompt = int(turn.split(" of ")[1].split(" prompt")[0])
        browser.until_text("#holders", f"of {prompt + 24} tokens")
        assert "w0 had the last turn" in browser.text("#holders-list")
        return browser.run(WIDTHS), turn, prompt, browser.text("#holders")

    (device, computed), turn, prompt, holders = await asyncio.to_thread(look)
    cached = int(turn.split("device ")[1].split(",")[0])
    assert f"device {cached}, computed {prompt - cached}" in turn
    assert f"{cached} of {prompt} prompt tokens cached" in turn
    assert cached > 16
    assert (device, computed) == pytest.approx((100 * cached / prompt, 100 - 100 * cached / prompt), abs=0.1)
    tokens = prompt + 24
    assert (
        f"device {tokens}" in holders or f"device {tokens // 16 * 16}" in holders or f"device {tokens - 1}" in holders
    )
    ledger = "parseFloat(document.querySelector('#ledger tbody tr .device')?.style.width) || 0"
    await asyncio.to_thread(browser.until, lambda: browser.run(ledger) == pytest.approx(device, abs=0.1))
    assert not browser.problems


def first(browser: Browser, part: str) -> str | None:
    """The line that this part of the page tells to copy, if it is seen."""
    line = f"document.querySelector('#{part}-first:not([hidden]) code')?.textContent"
    found = browser.run(line)
    return found if found is None else str(found)


async def test_first_steps_are_lines_that_work(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def shell(line: str) -> str:
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True).stdout

    def look() -> None:
        browser.open(f"{served.url}/")
        line = browser.until(lambda: first(browser, "timeline"))
        assert line.startswith(f"curl -N '{served.url}/v1/chat/completions' ")
        assert first(browser, "ledger") == line
        assert EVIL.partition("'")[0] in line, "of the first model, whatever it is called"
        assert first(browser, "workers") is None
        browser.run("document.querySelector('#timeline-first button').click()")
        browser.until(lambda: browser.text("#timeline-first button") in ("Copied", "Marked: copy it"))
        assert browser.run("String(getSelection())") == line
        assert "data: [DONE]" in shell(line)
        browser.until(lambda: first(browser, "timeline") is None and first(browser, "ledger") is None)
        assert len(labels(browser)) == 1
        browser.run(CHOOSE_DEMO)
        line = browser.until(lambda: first(browser, "ledger"))
        assert '{"model":"demo",' in line
        assert "data: [DONE]" in shell(line)
        browser.until(lambda: first(browser, "ledger") is None)
        open_text(browser)
        browser.until_text("#stays", EVIL)
        assert browser.run("document.title") == "kvfleet"

    await asyncio.to_thread(look)


async def test_without_workers_it_says_what_to_do(chromium: Browser, nats_url: str, fleet_buckets: Subjects) -> None:
    served = await serve(nats_url, fleet_buckets)

    def look() -> None:
        chromium.open(f"{served.url}/")
        line = chromium.until(lambda: first(chromium, "workers"))
        assert line == f"curl -s '{served.url}/readyz'"
        assert "No worker has registered yet." in chromium.text("#workers-first")
        said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True).stdout
        assert json.loads(said) == {"status": "no ready worker whose model is loaded"}
        chromium.open("about:blank")
        chromium.problems.clear()

    await asyncio.to_thread(look)
    await served.stop()


async def test_a_tenants_key_shows_its_own_streams_and_drains_nobody(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve(keys=KEYS)
    for name, model in (("alice", "demo"), ("bob", EVIL)):
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        answer = await served.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {name}"})
        assert answer.status_code == 200

    def use(key: str, expected: list[str]) -> None:
        browser.type("#key", key)
        browser.press("Enter")
        browser.until(lambda: sorted(labels(browser)) == expected)

    def look() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#status", "This ingress asks for an API key")
        assert browser.run("document.querySelector('#timeline-section').hidden")
        use("alice", ["w0"])
        assert browser.run("document.querySelectorAll('#workers button').length") == 0
        assert first(browser, "timeline") is None
        open_text(browser)
        browser.until(lambda: stays(browser) == [("w0", "done")])
        assert "w1" not in browser.text("#timeline-section")
        use("root", ["w0", "w1"])
        browser.until(lambda: browser.run("document.querySelectorAll('#workers button').length") == 2)
        use("bob", ["w1"])
        assert browser.run("document.querySelectorAll('#workers button').length") == 0
        browser.run("document.querySelector('#key-forget').click()")
        browser.until_text("#status", "This ingress asks for an API key")
        assert browser.run("document.querySelector('#timeline-section').hidden")
        assert (labels(browser), stays(browser)) == ([], []), "nothing of it is left"

    await asyncio.to_thread(look)


async def test_the_line_for_a_key_names_it_and_does_not_show_it(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve(keys=KEYS)

    def look() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#status", "This ingress asks for an API key")
        browser.type("#key", "alice")
        browser.press("Enter")
        line = browser.until(lambda: first(browser, "timeline"))
        assert '-H "authorization: Bearer $KVFLEET_API_KEY"' in line
        assert "alice" not in line
        run = subprocess.run(
            ["bash", "-c", f"KVFLEET_API_KEY=alice; {line}"], capture_output=True, text=True, timeout=60
        )
        assert "data: [DONE]" in run.stdout

    await asyncio.to_thread(look)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_its_colours_can_be_told_from_the_ground(
    browser: Browser, pair: PageFleet, scheme: str
) -> None:
    served = await pair.serve()

    def look(served: Served) -> None:
        try:
            browser.look(1280, 900, scheme)
            talk(browser, served.url, 24)
            browser.until(lambda: labels(browser))
            for width in (1280, 400):
                browser.look(width, 900, scheme)
                assert browser.run("document.documentElement.scrollWidth") <= width
                browser.run("document.querySelector(\"button[aria-label='Drain w0']\").click()")
                box = browser.run(DIALOG)
                assert 0 <= box[0] < box[1] <= width
                browser.run("document.querySelector('#drain-no').click()")
                button = "document.querySelector(\"button[aria-label='Drain w0']\").getBoundingClientRect().right"
                assert browser.run(button) <= width, "the button is seen without scrolling"
            contrasts = browser.run(CONTRASTS)
            assert {name: one for name, one in contrasts.items() if one < 3} == {}
        finally:
            browser.call("Emulation.clearDeviceMetricsOverride")
            browser.call("Emulation.setEmulatedMedia", features=[])

    await asyncio.to_thread(look, served)
