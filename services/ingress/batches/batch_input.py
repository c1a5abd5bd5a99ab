"""The lines of a batch's input file, and the multipart form that it comes in. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvproto.errors import InvalidRequest, KvfleetError
from kvproto.messages import BatchFault

MAX_LINE_BYTES = 512 * 1024  # a line's request travels in one NATS message
CHUNK_BYTES = MAX_LINE_BYTES
MAX_LINES = 50_000
MAX_FAULTS = 100
MAX_CUSTOM_ID = 512
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))')
_NAME = re.compile(rb'[ ;]name="([^"]{0,200})"')
_FILE_NAME = re.compile(rb'filename="([^"]{0,1000})"')


@dataclass(frozen=True, slots=True)
class InputLine:
    custom_id: str
    model: str
    body: dict[str, Any]


def chunks_of(data: bytes) -> list[bytes]:
    """The same bytes in pieces of whole lines. Raises InvalidRequest for a line that is too long."""
    chunks: list[bytes] = []
    piece: list[bytes] = []
    size = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRequest(f"line {number}: at most {MAX_LINE_BYTES} bytes, got {len(line)}", field="file")
        if size + len(line) > CHUNK_BYTES:
            chunks.append(b"".join(piece))
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        chunks.append(b"".join(piece))
    return chunks


def lines_of(chunk: bytes) -> Iterator[bytes]:
    """Those that say something."""
    return (line for line in chunk.splitlines() if line.strip())


def read_line(line: bytes, endpoint: str) -> InputLine:
    """Raises InvalidRequest naming the field."""
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(said, dict):
        raise InvalidRequest("must be a JSON object")
    custom_id, body = said.get("custom_id"), said.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise InvalidRequest(f"must be a string of 1 to {MAX_CUSTOM_ID} characters", field="custom_id")
    if said.get("method", "POST") != "POST":
        raise InvalidRequest("must be POST", field="method")
    if said.get("url") != endpoint:
        raise InvalidRequest(f"must be the batch's endpoint, {endpoint}", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest("must be a JSON object", field="body")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("must be a string", field="body.model")
    return InputLine(custom_id, model, body)


@dataclass(slots=True)
class InputCheck:
    """Reads a whole file once, chunk by chunk: how many lines it has, and what is wrong with them."""

    endpoint: str
    total: int = 0
    faults: list[BatchFault] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def read(self, chunk: bytes) -> None:
        for line in lines_of(chunk):
            self.total += 1
            if len(self.faults) >= MAX_FAULTS:
                return
            try:
                said = read_line(line, self.endpoint)
                if said.custom_id in self._seen:
                    raise InvalidRequest("is another line's, too", field="custom_id")
                self._seen.add(said.custom_id)
            except KvfleetError as error:
                self.faults.append(BatchFault("invalid_line", error.message[:1000], self.total, error.field or ""))

    def end(self) -> None:
        if not self.total:
            self.faults.append(BatchFault("empty_file", "the file has no line"))
        if self.total > MAX_LINES:
            self.faults.append(BatchFault("too_many_lines", f"at most {MAX_LINES} lines, got {self.total}"))


@dataclass(frozen=True, slots=True)
class FormPart:
    value: bytes
    file_name: str | None


def read_form(data: bytes, content_type: str | None) -> dict[str, FormPart]:
    """The parts of a multipart/form-data body by name. Raises InvalidRequest."""
    found = _BOUNDARY.search(content_type or "")
    if found is None or not (content_type or "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("must be multipart/form-data", field="content-type")
    mark = b"--" + (found[1] or found[2]).encode("latin-1")
    parts: dict[str, FormPart] = {}
    for piece in (b"\r\n" + data).split(b"\r\n" + mark)[1:]:
        if piece.startswith(b"--"):
            return parts
        head, blank, value = piece.partition(b"\r\n\r\n")
        if not blank or (name := _NAME.search(head)) is None:
            break
        file_name = _FILE_NAME.search(head)
        parts[name[1].decode("utf-8", "replace")] = FormPart(
            value, file_name[1].decode("utf-8", "replace") if file_name is not None else None
        )
    raise InvalidRequest("the multipart form is cut or malformed", field="body")
