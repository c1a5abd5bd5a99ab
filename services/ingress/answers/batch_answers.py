"""Answers of /v1/files and /v1/batches, as OpenAI's, and the lines of a batch's files. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import orjson

from kvfleet.ingress.http.answer_types import Described, Natural
from kvproto.messages import BatchHead, BatchStatus, FileHead, QueuedResult

OUTPUT, ERRORS = "output", "errors"  # of a batch's two files
Purpose = Literal["batch", "batch_output"]


class FileAnswer(Described):
    id: str
    object: Literal["file"]
    bytes: Natural
    created_at: Natural
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    expires_at: Natural | None


class FileDeleted(Described):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(Described):
    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchCounts(Described):
    total: Natural
    completed: Natural
    failed: Natural


class BatchProblem(Described):
    code: str
    message: str
    line: Natural | None
    param: str | None


class BatchProblems(Described):
    object: Literal["list"]
    data: list[BatchProblem]


class BatchAnswer(Described):
    """`output_file_id` and `error_file_id` can be read from the moment a batch is in progress: they have what is done
    so far."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal["validating", "in_progress", "cancelling", "completed", "failed", "expired", "cancelled"]
    errors: BatchProblems | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: Natural
    in_progress_at: Natural | None
    expires_at: Natural
    completed_at: Natural | None
    failed_at: Natural | None
    expired_at: Natural | None
    cancelling_at: Natural | None
    cancelled_at: Natural | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Described):
    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_answer(head: FileHead) -> FileAnswer:
    expires = head.expires_unix or None
    return FileAnswer(
        f"file-{head.file}", "file", head.bytes, head.created_unix, head.name, "batch", "processed", expires
    )


def output_answer(head: BatchHead, which: str, size: int) -> FileAnswer:
    """Of a batch's file, which has so many bytes now."""
    name = f"batch_{head.batch}_{which}.jsonl"
    begun = head.started_unix or head.created_unix
    return FileAnswer(output_id(head, which), "file", size, begun, name, "batch_output", "processed", None)


def output_id(head: BatchHead, which: str) -> str:
    return f"file-{head.batch}-{which}"


def batch_answer(head: BatchHead) -> BatchAnswer:
    def at(status: BatchStatus) -> int | None:
        return head.ended_unix if head.status is status else None

    problems = [BatchProblem(one.code, one.message, one.line or None, one.field or None) for one in head.faults]
    has_files = bool(head.started_unix)
    lacks = head.total - head.completed if head.status.is_end else head.failed
    return BatchAnswer(
        id=f"batch_{head.batch}",
        object="batch",
        endpoint=head.endpoint,
        input_file_id=f"file-{head.input_file}",
        completion_window=head.window,
        status=head.status.value,
        errors=BatchProblems("list", problems) if problems else None,
        output_file_id=output_id(head, OUTPUT) if has_files and not head.no_output else None,
        error_file_id=output_id(head, ERRORS) if has_files and lacks and not head.no_errors else None,
        created_at=head.created_unix,
        in_progress_at=head.started_unix or None,
        expires_at=head.expires_unix,
        completed_at=at(BatchStatus.COMPLETED),
        failed_at=at(BatchStatus.FAILED),
        expired_at=at(BatchStatus.EXPIRED),
        cancelling_at=head.cancelling_unix or None,
        cancelled_at=at(BatchStatus.CANCELLED),
        request_counts=BatchCounts(head.total, head.completed, head.failed),
        metadata=head.metadata or None,
    )


def result_line(batch: str, line: int, result: QueuedResult) -> bytes:
    name = f"batch_req_{batch}_{line}"
    response: dict[str, Any] | None = None
    if result.status:
        response = {"status_code": result.status, "request_id": name, "body": orjson.Fragment(result.body)}
    error = {"code": result.code, "message": result.message} if result.code else None
    said = {"id": name, "custom_id": result.custom_id, "response": response, "error": error}
    return orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)


def unanswered_line(head: BatchHead, line: int, custom_id: str) -> bytes:
    """Of a batch that ended before its line did."""
    code = "batch_expired" if head.status is BatchStatus.EXPIRED else "batch_cancelled"
    why = "it expired" if head.status is BatchStatus.EXPIRED else "it was cancelled"
    return result_line(
        head.batch,
        line,
        QueuedResult("", 0, code=code, message=f"this line was not done when {why}", custom_id=custom_id),
    )


def result_lines(batch: str, results: Iterable[tuple[int, QueuedResult]]) -> bytes:
    return b"".join(result_line(batch, line, result) for line, result in results)
