"""What a run came to, as the page docs/reliability.md, or docs/reliability-vllm.md. Pure."""

from __future__ import annotations

from kvproto.messages import Tier
from tests.chaos.checker import Verdict
from tests.chaos.history import History
from tests.chaos.layout import Layout
from tests.chaos.recovery import Row, rows
from tests.chaos.schedule import Kind
from tests.chaos.timeline import span

_RESUMES = "the stream goes on elsewhere; every token once, the same text"
_NOTHING = "nothing"
_SLOWER = "nothing but slower; never a wrong token"
_REPLICA = "nothing: another replica, or the ring"
_COMES_BACK = "its clients' connections break; they come back to another ingress with `Last-Event-ID` and go on"

PROMISES: dict[tuple[Kind, str], str] = {
    (Kind.KILL, "worker"): _RESUMES + "; a bare producer: a retryable `Failed` within 4 s",
    (Kind.KILL, "ingress"): _COMES_BACK,
    (Kind.KILL, "placement"): _REPLICA,
    (Kind.KILL, "vault"): _SLOWER,
    (Kind.STOP_SHORT, "worker"): "a pause",
    (Kind.STOP_SHORT, "ingress"): "a pause",
    (Kind.STOP_SHORT, "placement"): _REPLICA,
    (Kind.STOP_SHORT, "vault"): _SLOWER,
    (Kind.STOP_LONG, "worker"): _RESUMES + "; what it sends when it wakes is dropped",
    (Kind.STOP_LONG, "ingress"): "a pause",
    (Kind.STOP_LONG, "placement"): _REPLICA,
    (Kind.STOP_LONG, "vault"): _SLOWER,
    (Kind.DRAIN, "worker"): "nothing: what it works on is handed over; it exits 0 in its grace time",
    (Kind.DRAIN, "ingress"): "nothing: it finishes its streams and exits 0",
    (Kind.DRAIN, "placement"): _NOTHING,
    (Kind.DRAIN, "vault"): _SLOWER,
    (Kind.PARTITION, "worker"): _RESUMES,
    (Kind.PARTITION, "ingress"): "a pause",
    (Kind.PARTITION, "placement"): _REPLICA,
    (Kind.PARTITION, "vault"): _SLOWER,
    (Kind.PARTITION, "client"): "a pause",
    (Kind.DISK_FULL, "vault"): _SLOWER,
    (Kind.VAULT_SLOW, "vault"): _SLOWER,
    (Kind.VAULT_LYING, "vault"): _SLOWER,
    (Kind.NATS_KILL, "nats"): "a pause; nobody's blocks are forgotten",
    (Kind.NATS_STOP, "nats"): "a pause",
    (Kind.NATS_DRAIN, "nats"): "a pause",
}
_OTHERS = {
    Kind.UPGRADE: "nothing: both wire versions understand each other, in either direction",
    Kind.CUT: "a pause: it reconnects",
    Kind.CLOCK: "nothing: a jump of up to two hours changes no timeout",
    Kind.FRAMES_LOST: "nothing: they are asked for again",
    Kind.FRAMES_DUPLICATED: _NOTHING,
    Kind.FRAMES_REORDERED: _NOTHING,
    Kind.FRAMES_STALE: _NOTHING,
    Kind.EVENTS_MANGLED: "nothing: the index notices and asks for a snapshot",
    Kind.VLLM_ENGINE_KILL: _RESUMES,
    Kind.VLLM_SERVER_KILL: _RESUMES,
    Kind.VLLM_WORKER_KILL: _RESUMES,
    Kind.VLLM_HOST_KILL: _RESUMES,
    Kind.VLLM_STOP: "a pause",
    Kind.VLLM_HANG: "a pause; " + _RESUMES,
}

_OWN = {"title": "Reliability", "made_by": "make chaos", "workers": "", "picture": "reliability.svg"}
_VLLM = {
    "title": "Reliability with vLLM",
    "made_by": "make chaos ENGINE=vllm",
    "workers": "Its workers are sidecars, each beside a vLLM server of its own on this machine's processors.\n",
    "picture": "reliability-vllm.svg",
}


_HEAD = """\
# {title}

Written by `{made_by}`: real processes of a whole fleet under load, and one thing after the other broken on purpose.
{workers}How it is done and what is judged is told in the files of `tests/chaos/`.

This run: seed {seed}, {faults} faults in {lasted} minutes, two shared cores;
`{command}` repeats its schedule.

![faults and throughput over time]({picture})
"""
_FAULTS = """
## Faults

*Pause*: the longest one of any stream that ran when the fault happened and had to do with it, by its client's clock:
with re-prefill, and with the length of the fault itself where it is waited for. It is measured on two busy cores, where
processes start all the time; the gap that a lost worker alone leaves is measured by `benchmarks/`. *Ready*: from the
end of the fault, or the start of the next process, until others see it ready.

| fault | of | times | streams hit | pause, median | worst | ready after | what clients are promised |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
_LIMITS = """
## What is not promised

* A bare producer cannot ask for frames again: what NATS loses in an outage it does not see, and if the placement that
  watched its worker ends along with that worker, nobody tells it. Such requests are counted, not judged.
* The last worker of a model, both ingresses, both placements or both vaults are never broken at once.
* An outage of NATS has the fleet to itself: nothing else breaks, or still recovers, meanwhile.
"""


def promise(kind: Kind, role: str) -> str:
    return PROMISES.get((kind, role)) or _OTHERS[kind]


def page(seed: int, minutes: float, history: History, layout: Layout, verdict: Verdict, near_ties: int) -> str:
    """All of it; ends with a line break."""
    began, ended = span(history)
    counts = verdict.counts
    told, flag = (_VLLM, "--engine vllm ") if layout.has_vllm else (_OWN, "")
    faults = len(history.faults)
    total = [
        ("faults", f"{faults}"),
        ("requests", f"{counts['requests']:,}"),
        ("of them finished", f"{counts['finished']:,}"),
        ("of them left by their client", f"{counts['left']:,}"),
        ("bare producers told of their worker's loss", f"{counts['failed_as_promised']:,}"),
        (
            "bare producers hit by an outage of NATS or of their watcher: not promised",
            f"{counts['exempt']:,}",
        ),
        ("tokens compared with a run without faults", f"{counts['tokens']:,}"),
        ("streams gone on with after their connection broke", f"{counts['resumed']:,}"),
        ("refused before they were taken on, and tried again", f"{counts['refused']:,}"),
        ("answers that parted at a near tie (another token for logits that are 1e-4 off)", f"{near_ties}"),
        ("prompts of one tenant asked by another right after", f"{history.counts.get('canaries', 0):,}"),
        ("prompt tokens taken from device, host, vault, another worker", _reused(history)),
        ("messages lost, repeated, swapped and replayed on purpose", _mangled(history)),
        ("**requests lost**", f"**{verdict.count_of('lost')}**"),
        ("**tokens, events or ends repeated**", f"**{verdict.count_of('duplicated')}**"),
        ("**wrong answers**", f"**{verdict.count_of('wrong')}**"),
        ("**errors that nobody should have seen**", f"**{verdict.count_of('error')}**"),
        ("**leaks**", f"**{verdict.count_of('leak')}**"),
        ("**answers from another tenant's cache**", f"**{verdict.count_of('crossed')}**"),
        ("**processes that ended by themselves, or late**", f"**{verdict.count_of('process')}**"),
    ]
    lines = [
        _HEAD.format(
            seed=seed,
            faults=faults,
            lasted=f"{(ended - began) / 60:.1f}",
            command=f"python -m tests.chaos.run {flag}--minutes {minutes:g} --faults {faults} --seed {seed}",
            **told,
        ),
        "| what | |",
        "| --- | --- |",
        *(f"| {what} | {count} |" for what, count in total),
        _FAULTS,
        *(_row(row) for row in rows(history, layout)),
        _LIMITS,
    ]
    return "\n".join(lines)


def _row(row: Row) -> str:
    median = "" if row.median_s is None else f"{row.median_s:.2f} s"
    worst = "" if row.worst_s is None else f"{row.worst_s:.2f} s"
    back = "" if row.back_s is None or row.back_s < 0.1 else f"{row.back_s:.1f} s"
    told = promise(row.kind, row.role)
    return f"| {row.kind.value} | {row.role} | {row.count} | {row.streams} | {median} | {worst} | {back} | {told} |"


def _mangled(history: History) -> str:
    return ", ".join(
        f"{history.counts.get(f'frames {what}', 0):,}" for what in ("lost", "duplicated", "reordered", "stale")
    )


def _reused(history: History) -> str:
    return ", ".join(f"{history.counts.get(f'tokens from {tier.value}', 0):,}" for tier in Tier)
