"""Golden bytes: what was written by version 1 stays readable, and addresses that peers must agree on stay the same.

`python -m tests.contract.test_golden` writes files that are missing; it never changes one that exists. A released file
is never edited: a reader that cannot read it has broken the wire.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfleet.placement.index.changes import read_changes
from kvproto import block_hash, codec
from kvproto import messages as m
from kvproto.hash_ring import HashRing, point
from tests.support.kv_events import decode_events

FOLDER = Path(__file__).parent / "golden" / "v1"

SAMPLING = m.Sampling(
    max_tokens=64,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    seed=-5,
    stop=("\n\n", "ende"),
    stop_ids=(2, 3),
    ignore_eos=True,
)
RECORD = m.WorkerRecord(
    id="w1", epoch="0198f1c2a3b-00000000000000ff", lease="l1", state=m.State.READY, model="org/model ü",
    address="10.0.0.1:7000", host="node-1", pid=4711, versions=(1, 1), bundle="b" * 32, model_revision="rev",
    block_size=16, blocks=1000, context_length=2048, slots=16, started_unix_ms=1_763_700_000_000,
)  # fmt: skip
HEARTBEAT = m.Heartbeat(
    "w1", RECORD.epoch, m.State.DRAINING, m.Load(waiting=1, running=2, slots=16, blocks_used=3, blocks_total=1000),
    m.Rates(1234.5, 17.25, 270.0), event_seq=99, digest=2**64 - 1, held=77,
)  # fmt: skip
KEY = {"request": "a" * 26, "attempt": 2}
CHOICES = m.Sampling(
    max_tokens=8, n=3, min_p=0.05, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.25,
    logit_bias={5: -100.0, 2**32 - 1: 1.5}, logprobs=2, min_tokens=4, overflow=m.Overflow.TRUNCATE_LEFT,
)  # fmt: skip
HASHES = tuple(bytes([i]) * 16 for i in range(3))

WHO = {"tenant": "acme", "request": "a" * 26, "attempt": 2}
MILESTONES = m.Milestones(
    "w1",
    RECORD.epoch,
    (
        m.Milestone(**WHO, passed=m.Passed.ACCEPTED),
        m.Milestone(**WHO, passed=m.Passed.STARTED, seconds=0.25, prompt_tokens=40, cached={"device": 32, "host": 4}),
        m.Milestone(**WHO, passed=m.Passed.FIRST_TOKEN, seconds=0.5),
        m.Milestone(**WHO, passed=m.Passed.ENDED, seconds=1.5, output_tokens=9, code="moved"),
    ),
)
DECISION = m.Decision(
    **WHO, model="org/model \u00fc", unix_ms=1_763_700_000_000, policy="cost", worker="w1", why="fewest seconds",
    prompt_tokens=40, expected_hit={"device": 32}, expected_ttft_s=0.5,
    candidates=(
        m.Candidate("w1", 12.5, {"queue": 2.5, "prefill": 10.0}, {"device": 32}),
        m.Candidate("w2", 40.0, {"prefill": 40.0}),
    ),
    candidates_total=7, placement="p1",
    actual=m.Actual(True, {"device": 16}, 0.25, 0.5, 9, True, "moved"),
)  # fmt: skip

MESSAGES: dict[str, Any] = {
    "place_request": m.PlaceRequest(
        "a" * 26, "m", prompt_ids=(1, 2, 70_000), session="s", attempt=1, excluded=("w2",), max_tokens=64, policy="ring"
    ),
    "place_request_of_scores": m.PlaceRequest("a" * 26, "m", prompt_ids=(1, 2, 3), reusable=2),
    "placement": m.Placement("a" * 26, "w1", 1, {"device": 32}, 0.25, "ring", "owner of the key", "p1"),
    "generate_request": m.GenerateRequest(
        **KEY, model="m", sampling=SAMPLING, inbox="_ing.i1.b", prompt_ids=(0, 2**32 - 1), output_ids=(5,), text_sent=3,
        session="s", priority=-1, deadline_ms=1500, expires_unix_ms=1_763_700_000_000, traceparent="00-ab-cd-01",
        watcher="p1",
    ),
    "producer_request": m.ProducerRequest(prompt="Wer da? ü", max_tokens=5, temperature=0.0, stop=("x",), seed=7),
    "generate_request_choices": m.GenerateRequest(
        **KEY, model="m", sampling=CHOICES, inbox="_ing.i1.b", prompt_ids=(1,),
        continuations=(m.Continuation((5, 6), 2), m.Continuation((), 0), m.Continuation((7,), 1, m.FinishReason.STOP)),
    ),
    "producer_request_choices": m.ProducerRequest(
        prompt="x", n=2, min_p=0.5, presence_penalty=1.0, frequency_penalty=1.5, repetition_penalty=0.5,
        logit_bias={0: 1.0}, logprobs=0, min_tokens=1, context_overflow=m.Overflow.SLIDING,
    ),
    "generate_request_of_a_grammar": m.GenerateRequest(
        **KEY, model="m", inbox="_ing.i1.b", prompt_ids=(1,),
        sampling=m.Sampling(8, grammar=m.Grammar(m.GrammarForm.JSON_SCHEMA, '{"enum":["ü"]}', "guided_json")),
    ),
    "producer_request_of_a_format": m.ProducerRequest(
        prompt="x", grammar=m.Grammar(m.GrammarForm.REGEX, "[ab]+"),
        response_format=m.ResponseFormat(
            m.FormatType.JSON_SCHEMA, m.JsonSchema("n", {"type": "object", "required": ["a"]}, "of a", strict=True)
        ),
    ),
    "generate_request_of_a_chat": m.GenerateRequest(
        **KEY, model="m", sampling=SAMPLING, inbox="_ing.i1.b", output_ids=(5,), text_sent=3,
        chat=m.Chat('{"messages":[{"role":"user","content":"ü"}]}', "chat-a", 1_763_700_000),
    ),
    "producer_request_of_a_chat": m.ProducerRequest(
        messages=[{"role": "user", "content": "ü"}], tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="required", parallel_tool_calls=False, reasoning_effort="low", chat_template_kwargs={"a": None},
    ),
    "resend_request_choices": m.ResendRequest(**KEY, from_index=17, inbox="_ing.i1.b", from_indices=(17, 0, 2**40)),
    "continuation": m.Continuation((1, 2), 5, m.FinishReason.LENGTH),
    "cancel_request": m.CancelRequest("a" * 26, 1),
    "cancel_request_of_a_reader": m.CancelRequest("a" * 26, 1, "_INBOX.x", (3, 0, 7)),
    "resend_request": m.ResendRequest(**KEY, from_index=17, inbox="_ing.i1.b"),
    "pause_request": m.PauseRequest(**KEY, paused=True),
    "worker_record": RECORD,
    "worker_record_with_adapters": replace(RECORD, adapters=(m.Adapter("org/lora \u00fc", "r" * 26),)),
    "member_record": m.MemberRecord("i1", "e", "l", m.State.STARTING, m.Role.INGRESS, "h", 1, (1, 1), "a:1", "_ing.i1"),
    "heartbeat": HEARTBEAT,
    "snapshot_request": m.SnapshotRequest(m.Tier.HOST),
    "snapshot": m.Snapshot("e", 99, m.Tier.DEVICE, 0, 1, 2**63, b"".join(HASHES)),
    "admin_request": m.AdminRequest(m.AdminCommand.READ_KV, "public", (1, 2), 3),
    "admin_request_of_several": m.AdminRequest(m.AdminCommand.ERASE, "public", (1, 2), 0, 0, "q", 262_144, True),
    "admin_reply": m.AdminReply(1, 2, b"\0\xff", "d", "not_found", "no such block"),
    "worker_stats": m.WorkerStats(RECORD, HEARTBEAT),
    "inspection": m.Inspection(21, (4, 5)),
    "bundle": m.Bundle("m", "{}", None, "<s>", "</s>", (2,), 2048, 32_000, 0.6, special_tokens={"pad": "<pad>"}),
    "scale_request": m.ScaleRequest(4, "org/model ü"),
    "scale_reply": m.ScaleReply("org/model ü", 2),
    "scale_reply_of_an_error": m.ScaleReply("org/model ü", 2, "invalid_request", "it scales itself"),
    "admin_request_of_an_adapter": m.AdminRequest(m.AdminCommand.LOAD_ADAPTER, model="lora", path="/adapters/lora"),
    "admin_request_with_strays": m.AdminRequest(
        m.AdminCommand.ERASE, "public", (1, 2), keep=1, strays=(m.Stray(1, (3, 4)), m.Stray(2, (5,)))
    ),
    "session_strays": m.SessionStrays((m.Stray(1, (3, 4)), m.Stray(2, ()))),
    "session_head": m.SessionHead("chat 1", "m", 6, 1, 1, 2, "w1", m.Turn("r", "i1", 3), "g"),
    "response_head": m.ResponseHead(
        "a" * 26, "m", m.ResponseStatus.FAILED, 1_763_700_000, m.StoredBytes(b"asked"), m.StoredBytes(b"", "g", 3),
        True, ("b" * 26,), 1_763_700_009, "engine_failure", "it failed",
    ),
    "response_asked": m.ResponseAsked(b"{}", SAMPLING, "chat-x", "hermes", True, "{}", "<think>", (1, 2, 70_000)),
    "active_response": m.ActiveResponse("acme", "a" * 26, "i1", "k", -1, 2),
    "file_head": m.FileHead("a" * 26, "in ü.jsonl", 1000, 1_763_700_000, True, 2, 1_763_800_000),
    "batch_head": m.BatchHead(
        "a" * 26, "k", "b" * 26, "/v1/completions", "24h", 1_763_700_000, 1_763_786_400, m.BatchStatus.EXPIRED, "i1",
        {"for": "test"}, 9, 8, 5, 2, 12_345, 1_763_700_001, 0, 1_763_786_400,
        (m.BatchFault("invalid_line", "must be a string", 3, "custom_id"),), True, False, 1,
    ),
    "queued_request": m.QueuedRequest("job-1", {"model": "m", "prompt": "ü"}, expires_unix=1_763_700_000),
    "queued_request_of_a_line": m.QueuedRequest(
        "b-2", {"model": "m"}, "/v1/completions", 1_763_700_000, "a" * 26, 2, "c2", "k", True
    ),
    "queued_result": m.QueuedResult("job-1", 1_763_700_000, 200, "{}", custom_id="c2"),
    "queued_result_of_an_error": m.QueuedResult("job-1", 1_763_700_000, code="expired", message="too late"),
    "place_request_of_spare_work": m.PlaceRequest("a" * 26, "m", (1, 2), priority=-100, spare=True),
    "placement_stats": m.PlacementStats("p1", "ring", ("w1", "w2"), 10, 1, 2, 3),
    "placement_stats_hits": m.PlacementStats("p1", "cost", ("w1",), 10, 1, 2, 3, 1000, 600, 700, 120, 5000, 1),
    "snapshot_request_all_tiers": m.SnapshotRequest(),
    "snapshot_part_of_several": m.Snapshot("e", 99, m.Tier.HOST, 2, 3, 1, HASHES[0]),
    "snapshot_of_states": m.Snapshot("e", 99, m.Tier.STATE, 1, 2, 2**63, b"".join(HASHES), 2**62),
    "worker_record_public_prefixes": replace(
        RECORD,
        block_bytes=393_216,
        public_prefixes=(m.PublicPrefix(32, HASHES[1]), m.PublicPrefix(48, HASHES[2])),
    ),
    "worker_record_of_grammars": replace(RECORD, grammars=True),
    "worker_record_of_chats": replace(RECORD, chats=True),
    "worker_record_that_scores": replace(RECORD, scores=True),
    "generate_request_of_scores": m.GenerateRequest(
        **KEY, model="m", inbox="_ing.i1.b", prompt_ids=(1, 2, 3), sampling=m.Sampling(0, prompt_logprobs=5), scored=2
    ),
    "producer_request_of_scores": m.ProducerRequest(prompt="x", prompt_logprobs=0),
    "resend_request_of_scores": m.ResendRequest(**KEY, from_index=0, inbox="_ing.i1.b", scored=17),
    "worker_record_of_beams": replace(RECORD, beams=True),
    "generate_request_of_beams": m.GenerateRequest(
        **KEY, model="m", inbox="_ing.i1.b", prompt_ids=(1, 2),
        sampling=m.Sampling(8, n=2, beams=m.Beams(4, -0.5, m.EarlyStopping.NEVER)),
    ),
    "producer_request_of_beams": m.ProducerRequest(prompt="x", n=2, beams=m.Beams(2)),
    "worker_record_loading": replace(RECORD, loading=m.Loading("loading weights", 3_221_225_472, 16_060_522_496, 7)),
    "worker_record_role": replace(RECORD, role=m.WorkerRole.PREFILL),
    "place_request_successor": m.PlaceRequest("r", "m", (1, 2), attempt=1, excluded=("p",), successor="d"),
    "placement_then": m.Placement("r", "p", 0, then="d"),
    "generate_request_then": m.GenerateRequest(
        **KEY, model="m", inbox="_ing.i1.b", prompt_ids=(1, 2), sampling=m.Sampling(8), then="d"
    ),
    "generate_request_ahead": m.GenerateRequest(
        **KEY, model="m", inbox="_ing.i1.b", prompt_ids=(1, 2), sampling=m.Sampling(8), source="p", ahead=True
    ),
    "worker_record_engine": replace(RECORD, engine="vllm", engine_pid=4712),
    "heartbeat_restore_rates": replace(
        HEARTBEAT, rates=m.Rates(1234.5, 17.25, 270.0, {"host": 8e9, "vault": 1.5e8})
    ),
    "milestones": MILESTONES,
    "booked_batch": m.BookedBatch("p1", (m.Booked(**WHO, worker="w1", tokens=40), m.Booked("t", "r", 0, "w2", 0))),
    "usage_report": m.UsageReport(
        "i1", "0198f1c2a3b-00000000000000ff", 7,
        (
            m.AccountUsage(
                "acme", 3, "k", 12.5, 2, 40, 9000, 20_413, 8000, 3.25, 512.5, 9500, 600.0, 1.5e6, 2**40, ended=True
            ),
            m.AccountUsage("acme", 1, running=5),
        ),
    ),
    "explain_request": m.ExplainRequest("a" * 26, "acme"),
    "explain_request_any_tenant": m.ExplainRequest("a" * 26),
    "explain_request_newest": m.ExplainRequest("", "acme", 50, "org/model"),
    "explanation_timed": m.Explanation("p1", (replace(DECISION, actual=replace(DECISION.actual, total_s=1.5)),)),
    "return_expected": m.ReturnExpected(**WHO, session="chat-\u00fc", soonest_s=12.5, latest_s=90.0),
    "producer_request_that_comes_back": m.ProducerRequest(prompt="x", session="s", expect_return_s=30.0),
    "worker_record_of_pauses": replace(RECORD, pauses=True),
    "heartbeat_of_pauses": replace(
        HEARTBEAT,
        load=m.Load(paused=3, brought_blocks_total=70_000, given_back_blocks_total=16, saved_s_total=12.5),
    ),
    "milestones_of_a_return": m.Milestones("w1", "e", (m.Milestone(**WHO, passed=m.Passed.STARTED, saved_s=1.5),), 7),
    "explanation_of_a_return": m.Explanation("p1", (replace(DECISION, actual=m.Actual(True, saved_s=1.5)),)),
    "placement_stats_of_pauses": m.PlacementStats("p1", "cost", (), 1, 0, 0, 0, paused=3, saved_s_total=12.5),
    "explanation_part": m.Explanation("p1", (DECISION,), True),
    "explanation": m.Explanation("p1", (DECISION, replace(DECISION, expected_ttft_s=None, actual=m.Actual()))),
}  # fmt: skip
FRAMES: list[m.Frame] = [
    m.Accepted(**KEY, worker="w1", epoch="e"),
    m.Started(**KEY, worker="w1", prompt_tokens=5, cached={"device": 4}, queue_s=0.5),
    m.Tokens(**KEY, choice=0, index=7, ids=(1, 2**32 - 1), text=("ü", "")),
    m.Finished(**KEY, reason=m.FinishReason.STOP, prompt_tokens=5, output_tokens=9, cached_tokens=4, worker="w1"),
    m.Failed(**KEY, code="out_of_memory", message="no room", retryable=True, field="prompt", output_tokens=3),
    m.Moved(**KEY, output_tokens=9, to="w2"),
    m.Progress(**KEY, next_index=9),
]
CHOICE_FRAMES: list[m.Frame] = [  # since several choices and log probabilities are served
    m.Tokens(
        **KEY, choice=2, index=7, ids=(1, 9), text=("\u00fc", ""),
        logprobs=(m.TokenLogprobs(-0.25, (1, 3), (-0.25, -9999.0)), m.TokenLogprobs(-2.5)),
    ),
    m.ChoiceFinished(**KEY, choice=2, reason=m.FinishReason.LENGTH, output_tokens=9),
]  # fmt: skip
MESSAGE = m.AssistantMessage(
    "tool_calls",
    "Well.",
    "Hm.",
    (m.AssistantCall("abcdefghi", "f", '{"a": "ü"}'), m.AssistantCall("jklmnopqr", "g", "{}")),
)
CHAT_FRAMES: list[m.Frame] = [  # since workers render chats
    m.Tokens(
        **KEY, choice=0, index=7, ids=(1, 9, 8), text=("a", "b", "c"),
        deltas=(
            m.AssistantDelta("Well.", "Hm."), m.AssistantDelta(),
            m.AssistantDelta(tool_calls=(m.AssistantCallDelta(0, arguments='ü"}'), m.AssistantCallDelta(1, "j", "g"))),
        ),
    ),
    m.ChoiceFinished(**KEY, choice=2, reason=m.FinishReason.STOP, output_tokens=9, message=MESSAGE),
    m.Finished(**KEY, reason=m.FinishReason.STOP, prompt_tokens=5, output_tokens=9, worker="w1", message=MESSAGE),
]  # fmt: skip
SCORES = m.PromptScores(
    **KEY, index=1, logprobs=(m.TokenLogprobs(-0.25, (1, 3), (-0.25, -9999.0), 1), m.TokenLogprobs(-2.5, rank=70_000))
)
STOP_TOKEN = m.StopToken(2, m.TokenLogprobs(-0.5, (2,), (-0.5,)))
STOPPED: list[m.Frame] = [
    m.ChoiceFinished(**KEY, choice=1, reason=m.FinishReason.STOP, output_tokens=9, stop_token=STOP_TOKEN),
    m.Finished(**KEY, reason=m.FinishReason.STOP, prompt_tokens=5, output_tokens=9, stop="x", stop_token=STOP_TOKEN),
]
EVENTS = m.KvEvents(
    "e",
    7,
    (m.TierEvents(m.Tier.DEVICE, False, (m.BlockRun(HASHES[0], HASHES[1:]),)), m.TierEvents(m.Tier.HOST, True, ())),
)
STATE_EVENTS = m.KvEvents(
    "e",
    8,
    (
        m.TierEvents(m.Tier.STATE, True, (m.BlockRun(b"", HASHES[:1]),)),
        m.TierEvents(m.Tier.STATE, False, (m.BlockRun(b"", HASHES[1:]),)),
    ),
)


def _golden() -> dict[str, tuple[bytes, Any, Callable[[bytes], Any]]]:
    """File name -> what it is written from today, what it must be read as, and how it is read."""
    out: dict[str, tuple[bytes, Any, Callable[[bytes], Any]]] = {
        name: (codec.encode(message), message, lambda data, kind=type(message): codec.decode(kind, data))
        for name, message in MESSAGES.items()
    }
    out["frames"] = (codec.encode_frames(FRAMES), FRAMES, codec.decode_frames)
    out["frames_choices"] = (codec.encode_frames(CHOICE_FRAMES), CHOICE_FRAMES, codec.decode_frames)
    out["frames_chat"] = (codec.encode_frames(CHAT_FRAMES), CHAT_FRAMES, codec.decode_frames)
    out["frames_scores"] = (codec.encode_frames([SCORES]), [SCORES], codec.decode_frames)
    out["frames_stop_token"] = (codec.encode_frames(STOPPED), STOPPED, codec.decode_frames)
    out["events"] = (codec.encode_events(EVENTS), EVENTS, decode_events)
    out["events_of_states"] = (codec.encode_events(STATE_EVENTS), STATE_EVENTS, decode_events)
    for as_json in (False, True):
        kind = "json" if as_json else "msgpack"
        request = MESSAGES["producer_request"]
        body = codec.to_map(request, packed=False)
        out[f"producer_{kind}"] = (
            json.dumps(body).encode() if as_json else codec.encode(request)[1:],
            request,
            lambda data, as_json=as_json: codec.decode_plain(m.ProducerRequest, data, as_json=as_json),
        )
        scored, ended = CHOICE_FRAMES
        plain = {type(frame).__name__.lower(): frame for frame in (*FRAMES, ended)} | {"scored_tokens": scored}
        plain |= {f"{type(frame).__name__.lower()}_of_a_chat": frame for frame in CHAT_FRAMES}
        plain["promptscores"] = SCORES
        plain["finished_by_a_stop_token"] = STOPPED[1]
        for name, frame in plain.items():
            out[f"plain_{name}_{kind}"] = (
                codec.encode_plain_frame(frame, as_json=as_json),
                frame,
                lambda data, as_json=as_json: codec.decode_plain_frame(data, as_json=as_json),
            )
    return out


GOLDEN = _golden()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_stay_readable(name: str) -> None:
    _, expected, read = GOLDEN[name]
    assert read((FOLDER / f"{name}.bin").read_bytes()) == expected


@pytest.mark.parametrize(("name", "events"), [("events", EVENTS), ("events_of_states", STATE_EVENTS)])
def test_placement_reads_golden_events(name: str, events: m.KvEvents) -> None:
    changes = read_changes((FOLDER / f"{name}.bin").read_bytes())
    assert (changes.epoch, changes.seq) == (events.epoch, events.seq)
    assert [(one.tier, one.removed, one.hashes.tobytes()) for one in changes.changes] == [
        (one.tier.number, one.removed, b"".join(h for run in one.runs for h in run.hashes)) for one in events.changes
    ]


def test_every_golden_file_is_read() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(GOLDEN)


# ---------------------------------------------------------------------------------------------- addresses


def test_tenant_salt_is_hmac_sha256() -> None:
    """RFC 4231, test case 2."""
    salt = block_hash.tenant_salt(b"Jefe", "what do ya want for nothing?")
    assert salt.hex() == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"


def test_root_and_chain_vectors() -> None:
    salt = block_hash.tenant_salt(b"fleet key", "public")
    root = block_hash.root("revision-1", 16, salt)
    chain = block_hash.chain(root, range(40), 16)
    assert root.hex() == "a813472001708742079deae7ef7acd94"
    assert [block.hex() for block in chain] == ["897717d30e5c149413fae62b04ce1801", "9cb0baae0848e5f8cd80d231373c9be7"]


def test_ring_vectors() -> None:
    """MD5's first 32 bits, big-endian; RFC 1321 gives MD5("") and MD5("abc")."""
    assert point("") == 0xD41D8CD9
    assert point("abc") == 0x90015098
    assert [point(f"w1-vn-{i}") for i in (0, 1, 99)] == [693183975, 768186452, 2545306140]
    ring = HashRing(["w1", "w2", "w3", "w4"])
    assert [ring.owner(f"public/s/{i}") for i in range(8)] == ["w4", "w2", "w3", "w3", "w4", "w3", "w4", "w1"]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (data, _, _) in GOLDEN.items():
        if not (FOLDER / f"{name}.bin").exists():
            (FOLDER / f"{name}.bin").write_bytes(data)
