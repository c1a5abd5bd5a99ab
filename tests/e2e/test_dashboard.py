"""The page in a real Chromium, before real worker loops, a real placement and an ingress.

Skipped where there is no Chromium (Debian's package `chromium`, or KVFLEET_CHROMIUM names one).
"""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from itertools import pairwise
from typing import Any

import pytest

from kvfleet.ingress.dashboard.page import INDEX, read_files
from tests.integration.ingress.ingress_rig import until
from tests.support.browser import Browser
from tests.support.page_fleet import EVIL, GO_ON, KEYS, PageFleet

NO_ANSWER = "window.fetch = () => new Promise(() => {});"
# Whether the form for a key can be seen, and in it the button that forgets one.
KEY_FORM = "['key', 'key-forget'].map((id) => document.getElementById(id).checkVisibility())"
# One attempt of one request: of two replicas, and of one of them twice; then again, to see that no row is another's.
STARTING = """
(async () => {
  const { WorkersTable } = await import(new URL('/dashboard/workers.js', location.href));
  const table = document.createElement('table');
  table.createTBody();
  const loading = [['loading weights', 30, 40], ['importing torch', 0, 0]].map(
    ([doing, weight_bytes, total_bytes]) => ({ doing, weight_bytes, total_bytes, kernels: 0 }));
  const started = [['starting', loading[0]], ['starting', loading[1]], ['starting', null], ['dead', loading[1]]];
  const workers = Object.fromEntries(started.map(([state, loading], at) => [
    `w${at}`, { state, loading, model: 'demo', engine: 'own', host: 'h', load: {} }]));
  const rates = { hitRate: () => null, tokensPerSecond: () => null };
  new WorkersTable(table, document.createElement('p')).fill(workers, rates);
  return [...table.tBodies[0].rows].map((row) => row.querySelector('[data-column=state]').textContent);
})()
"""
DECIDED_TWICE = """
(async () => {
  const { Ledger } = await import(new URL('/dashboard/ledger.js', location.href));
  const table = document.createElement('table');
  table.createTBody();
  const ledger = new Ledger(table, document.createElement('p'));
  const decided = [['w0', 'p0', 4000], ['w1', 'p1', 3000], ['w2', 'p0', 2000], ['w3', 'p1', 2000]];
  const placements = decided.map(([worker_id, placement_id, decided_unix_ms]) => ({
    tenant: 'acme', request_id: 'r', attempt: 0, model: 'demo', policy: 'cost', prompt_tokens: 1,
    expected_hit_tokens: {}, actual: {}, worker_id, placement_id, decided_unix_ms }));
  ledger.fill(placements);
  ledger.fill(placements);
  return [...table.tBodies[0].rows].map((row) => row.querySelector('[data-column=worker]').textContent);
})()
"""
LOADED = (
    "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
    ".filter((one) => one.startsWith('/dashboard/'))"
)
# One worker, sampled at 0, 1, 2 and 70 s; it begins a new life at 2 s.
COMPUTED = """
(async () => {
  const [{ Rates }, { Turn }, figures] = await Promise.all(
    ['rates', 'turn', 'figures'].map((name) => import(new URL(`/dashboard/${name}.js`, location.href))));
  const rates = new Rates();
  const said = [];
  for (const [at, epoch, prompt, hit, generated] of
       [[0, 1, 100, 50, 10], [1, 1, 140, 80, 40], [2, 2, 7, 7, 7], [70, 2, 7, 7, 75]]) {
    const load = { prompt_tokens_total: prompt, hit_tokens_total: hit, generated_tokens_total: generated };
    rates.add({ w0: { epoch, load } }, at);
    said.push([rates.hitRate(), rates.tokensPerSecond(), rates.hitRate('w1')]);
  }
  const turn = new Turn(1000);
  const heard = [{ content: 'a' }, {}, { content: 'b' }].map((delta, at) =>
    turn.hear({ choices: [{ delta }] }, 1500 + 500 * at));
  const { bytes, count, milliseconds, seconds, share, tiers } = figures;
  const written = [
    count(null), count(12345), share(-1e-9), milliseconds(9.96), milliseconds(1500), seconds(0), bytes(1536),
    tiers({ host: 3, disk: 0, device: 1000 }),
  ];
  return { said, heard, text: turn.text, about: turn.about(), written };
})()
"""


async def test_what_it_computes(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def compute() -> Any:
        browser.open(f"{served.url}/")
        return browser.run(COMPUTED)

    got = await asyncio.to_thread(compute)
    assert got["said"] == [[None, None, None], [0.75, 30, None], [0.75, 15, None], [None, 1, None]]
    assert got["heard"] == [True, False, True]
    assert (got["text"], got["about"]) == ("ab", "TTFT 500 ms · 1.0 tokens/s")
    assert got["written"] == ["–", "12,345", "0.0%", "10.0 ms", "1.5 s", "–", "1.5 KiB", "host 3, device 1,000"]


async def test_what_it_shows_and_a_conversation(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()
    shipped = set(read_files(resources.files("kvfleet.ingress.dashboard")))

    def look() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#status", "Live")
        assert set(browser.run(LOADED)) == {f"/dashboard/{name}" for name in shipped - {INDEX}}, "all, and each needed"
        browser.until(lambda: browser.run("document.querySelectorAll('#workers tbody tr').length") == 2)
        row = browser.text("#workers tbody tr:nth-child(2)").split("\t")
        assert row[:3] == ["w1", "ready", EVIL], "a name is text"
        assert "workers ready\n2 of 2" in browser.text("#fleet")
        assert "device" in browser.text("#tiers tbody")
        assert browser.run("document.querySelector('#chat-model').options.length") == 2

    def talk() -> None:
        browser.run(GO_ON)
        browser.run("document.querySelector('#chat-model').value = 'demo'")
        browser.run("document.querySelector('#chat-max').value = 24")
        for turn, said in ((1, "Who goes there? " * 8), (2, "And then?")):
            browser.type("#said", said)
            browser.press("Enter")
            answer = f"#turns .turn:nth-child({2 * turn})"
            browser.until_text(answer, "24 generated")
            about = browser.text(f"{answer} .quiet")
            assert "TTFT" in about
            assert "tokens/s" in about
            assert about.endswith("w0")
        cached, prompt = (int(word) for word in about.split(" prompt")[0].split(" of "))
        assert prompt > cached > 32, "the conversation goes on: its prefix is reused"

    def open_entry() -> None:
        browser.until_text("#ledger tbody", "demo")
        browser.run("document.querySelector('#ledger tbody button').focus()")
        browser.press("Enter")
        detail = browser.until(lambda: browser.text("#ledger .detail"))
        assert "w0 (chosen)" in detail
        assert "prefill ms" in detail
        browser.until_text("#ledger-note", "stands still")
        browser.press("Enter")
        assert browser.text("#ledger .detail") == ""

    def fast() -> None:
        browser.run(f"document.querySelector('#chat-model').value = {json.dumps(EVIL)}")
        browser.run("document.querySelector('#chat-max').value = 3000")
        browser.type("#said", "Go on and on.")
        browser.press("Enter")
        browser.until_text("#turns .turn:last-child .quiet", "3,000 generated")  # drawn token by token: half a minute
        browser.run("document.querySelector('#chat-new').click()")
        browser.run("document.querySelector('#chat-model').value = 'demo'")

    def begin_long() -> None:
        browser.run("document.querySelector('#chat-max').value = 3000")
        browser.type("#said", "Go on.")
        browser.press("Enter")
        browser.until_text("#turns .turn:last-child .quiet", "TTFT")
        assert browser.run("document.querySelector('#chat-stop').disabled") is False

    def stop_it() -> None:
        browser.run("document.querySelector('#chat-stop').click()")
        browser.until_text("#turns .turn:last-child .quiet", "stopped")

    def one_at_a_time() -> None:
        asked = browser.run(
            "performance.getEntriesByType('resource').filter((one) => one.initiatorType === 'fetch')"
            ".map((one) => [one.name, one.startTime, one.responseEnd])"
        )
        polled = sorted(one[1:] for one in asked if "/chat/" not in one[0] and "/sessions/" not in one[0])
        assert len(polled) >= 8
        assert all(before[1] <= after[0] for before, after in pairwise(polled)), polled

    def refused() -> None:
        browser.run("document.querySelector('#chat-max').value = 900000")
        browser.type("#said", "Too much.")
        browser.press("Enter")
        browser.until_text("#turns .turn:last-child .quiet", "max_tokens: ")
        assert browser.run("document.querySelector('#said').value") == "Too much."

    for step in (look, talk, open_entry, fast, begin_long):
        await asyncio.to_thread(step)
    assert served.ingress.admission.running == 1
    await asyncio.to_thread(stop_it)
    await until(lambda: served.ingress.admission.running == 0)
    await until(lambda: not fleet.workers.workers["w0"].thread.engine.scheduler.running)
    await asyncio.to_thread(one_at_a_time)
    await asyncio.to_thread(refused)
    not_kept_yet = f"status of 404 (Not Found) {served.url}/sessions/"  # where the first turn is slow to end
    assert all("status of 400" in one or not_kept_yet in one for one in browser.problems), browser.problems
    assert await asyncio.to_thread(browser.run, "document.title") == "kvfleet"


async def test_a_worker_dies_and_the_ingress_goes_away_and_comes_back(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def see(selector: str, part: str) -> None:
        browser.until_text(selector, part)

    await asyncio.to_thread(browser.open, f"{served.url}/")
    await asyncio.to_thread(see, "#status", "Live")
    await fleet.workers.workers["w1"].kill()
    served.client.members.view.workers["w1"].deleted = True  # as when placement has deleted its record
    await asyncio.to_thread(see, "#workers tbody tr:nth-child(2)", "dead")
    await asyncio.to_thread(see, "#fleet", "workers ready\n1 of 1")
    assert await asyncio.to_thread(browser.run, KEY_FORM) == [False, False], "no key is asked for"
    await served.go_away()
    await asyncio.to_thread(see, "#status", "The ingress does not answer since ")
    assert await asyncio.to_thread(browser.run, KEY_FORM) == [True, False]
    await served.come_back()
    await asyncio.to_thread(see, "#status", "Live")
    assert await asyncio.to_thread(browser.run, KEY_FORM) == [False, False]
    assert all("ERR_CONNECTION" in one or "ERR_EMPTY" in one for one in browser.problems), browser.problems


@pytest.mark.parametrize("file", ["figures.js", "dashboard.css"])
async def test_a_part_of_the_page_that_does_not_come_is_asked_for_again(
    browser: Browser, fleet: PageFleet, file: str
) -> None:
    served = await fleet.serve()

    def look() -> None:
        browser.call("Network.enable")
        browser.call("Network.setBlockedURLs", urls=[f"*/{file}"])
        browser.open(f"{served.url}/")
        browser.until_text("#status", "A part of this page did not come")
        browser.call("Network.disable")
        browser.until_text("#status", "Live")
        assert browser.run("document.styleSheets.length") == 1

    await asyncio.to_thread(look)


async def test_keys_show_what_they_may(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve(keys=KEYS)
    for name in ("alice", "bob"):
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        await served.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {name}"})

    def use(key: str) -> None:
        browser.type("#key", key)
        browser.press("Enter")

    def rows(table: str) -> int:
        return int(browser.run(f"document.querySelectorAll('#{table} tbody tr').length"))

    def look() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#status", "This ingress asks for an API key")
        browser.until_text("#fleet", "workers ready\n2")
        assert (rows("workers"), rows("ledger")) == (0, 0)
        use("wrong")
        browser.until_text("#status", "The key was refused: ")
        assert "this API key is not known" in browser.text("#status")
        assert browser.run("sessionStorage.length") == 0, "what is refused is not kept"
        use("alice")
        browser.until_text("#status", "Live")
        browser.until_text("#workers-note", "Workers and tiers need an admin key")
        browser.until(lambda: rows("ledger") == 1)
        assert "acme" in browser.text("#ledger tbody")
        assert rows("workers") == 0
        browser.run("document.querySelector('#chat-model').value = 'demo'")
        browser.type("#said", "hello")
        browser.press("Enter")
        browser.until_text("#turns", "generated")
        use("root")
        browser.until(lambda: (rows("workers"), rows("ledger")) == (2, 3))
        kept = browser.run("[JSON.stringify(sessionStorage), localStorage.length, document.cookie, location.href]")
        assert kept == ['{"kvfleet-api-key":"root"}', 0, "", f"{served.url}/"]
        assert browser.run("document.querySelector('#key').type") == "password"
        assert browser.run("document.querySelector('#key').value") == ""
        browser.run("document.querySelector('#key-forget').click()")
        browser.until_text("#status", "This ingress asks for an API key")
        assert (rows("workers"), rows("ledger"), browser.run("sessionStorage.length")) == (0, 0, 0)

    await asyncio.to_thread(look)
    assert all("status of 401" in one or "status of 403" in one for one in browser.problems), browser.problems


async def test_a_key_that_no_header_can_carry_locks_nobody_out(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve(keys=KEYS)

    def use(key: str) -> None:
        browser.type("#key", key)
        browser.press("Enter")

    def kept() -> Any:
        return browser.run("JSON.stringify(sessionStorage)")

    def look() -> None:
        browser.open(f"{served.url}/")
        browser.until_text("#status", "This ingress asks for an API key")
        use("sk–x")
        browser.until_text("#key-problem", "a key has printable ASCII characters alone")
        assert (kept(), browser.run(KEY_FORM)) == ("{}", [True, False])
        use("root")
        browser.until_text("#status", "Live")
        assert browser.text("#key-problem") == ""
        use("ключ")
        browser.until_text("#key-problem", "Not used")
        assert kept() == '{"kvfleet-api-key":"root"}', "the one in use stays"
        browser.run("sessionStorage.setItem('kvfleet-api-key', 'sk–x')")
        browser.open(f"{served.url}/")
        browser.until_text("#status", "This ingress asks for an API key")
        assert (kept(), browser.run(KEY_FORM)) == ("{}", [True, False])
        use("root")
        browser.until_text("#status", "Live")

    def forget() -> None:
        browser.until_text("#status", "The ingress does not answer since ")
        assert browser.run(KEY_FORM) == [True, True]
        browser.run("document.querySelector('#key-forget').click()")
        assert (kept(), browser.run(KEY_FORM)) == ("{}", [True, False])

    await asyncio.to_thread(look)
    await served.go_away()
    await asyncio.to_thread(forget)
    await served.come_back()
    await asyncio.to_thread(browser.until_text, "#status", "This ingress asks for an API key")


async def test_a_stored_key_can_be_changed_before_anything_has_answered(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve(keys=KEYS)

    def look() -> None:
        browser.open(f"{served.url}/openapi.json")
        browser.run("sessionStorage.setItem('kvfleet-api-key', 'root')")
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=NO_ANSWER)["identifier"]
        browser.open(f"{served.url}/")
        assert browser.run(KEY_FORM) == [True, True]
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        browser.run("document.querySelector('#key-forget').click()")
        assert browser.run("sessionStorage.length") == 0

    await asyncio.to_thread(look)


async def test_an_attempt_that_two_replicas_decided_is_two_rows(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def look() -> Any:
        browser.open(f"{served.url}/")
        return browser.run(DECIDED_TWICE)

    rows = await asyncio.to_thread(look)
    assert rows == ["w0", "w1", "w2", "w3"]


async def test_a_starting_worker_tells_what_it_does(browser: Browser, fleet: PageFleet) -> None:
    served = await fleet.serve()

    def look() -> Any:
        browser.open(f"{served.url}/")
        return browser.run(STARTING)

    assert await asyncio.to_thread(look) == ["loading weights 75.0%", "importing torch", "starting", "dead"]


async def test_the_policy_holds(browser: Browser, fleet: PageFleet) -> None:
    """What a fault of the script could do wrong, the browser refuses."""
    served = await fleet.serve()

    def refused(script: str) -> str:
        return str(browser.run(f"(() => {{ try {{ {script}; return 'done' }} catch (e) {{ return e.name }} }})()"))

    def look() -> None:
        browser.open(f"{served.url}/")
        assert refused("document.body.innerHTML = '<b>x</b>'") == "TypeError"
        assert refused("document.querySelector('#status').insertAdjacentHTML('beforeend', 'x')") == "TypeError"
        assert refused("new Function('return 1')()") == "EvalError"
        assert browser.run("fetch('http://127.0.0.1:1/').then(() => 'done', (e) => e.name)") == "TypeError"

    await asyncio.to_thread(look)
    assert any("Content Security Policy" in one for one in browser.problems)
