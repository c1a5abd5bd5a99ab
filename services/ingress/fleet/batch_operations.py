"""The operations of files and batches in the OpenAPI description. Pure."""

from __future__ import annotations

from typing import Any

from kvfleet.ingress.answers.batch_answers import BatchAnswer, BatchList, FileAnswer, FileDeleted, FileList
from kvfleet.ingress.fleet.operations import KNOWN, TEXT, Operation, json_of, parameter, reading
from kvfleet.ingress.requests.batches import BATCH, MOST_BATCHES, MOST_FILES

_OF_FILES = (404, 429, *KNOWN)
_AFTER = parameter("query", "after", {"type": "string", "minLength": 1}, "the one before the first")
_UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines, a request each"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
BATCH_OPERATIONS = (
    Operation(
        "post",
        "/v1/files",
        "Upload the requests of a batch, as OpenAI's.",
        {200: {"description": "The file.", "content": json_of(FileAnswer)}},
        (400, 408, 413, 429, *KNOWN),
        _UPLOAD,
        media="multipart/form-data",
    ),
    reading(
        "/v1/files",
        "What was uploaded, the newest first.",
        FileList,
        *(400, 429, *KNOWN),
        parameters=(
            parameter("query", "purpose", TEXT, "of this purpose alone"),
            parameter("query", "order", {"enum": ["asc", "desc"]}, "default desc"),
            parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MOST_FILES}, "default 10000"),
            _AFTER,
        ),
    ),
    reading("/v1/files/{file_id}", "A file, or a batch's results.", FileAnswer, *_OF_FILES),
    Operation(
        "delete",
        "/v1/files/{file_id}",
        "Forget a file. A batch that has not ended keeps its own.",
        {200: {"description": "It is gone.", "content": json_of(FileDeleted)}},
        (409, *_OF_FILES),
    ),
    Operation(
        "get",
        "/v1/files/{file_id}/content",
        "Its bytes. Results of a batch can be read while it runs.",
        {200: {"description": "JSON lines", "content": {"application/jsonl": {"schema": TEXT}}}},
        _OF_FILES,
    ),
    Operation(
        "post",
        "/v1/batches",
        "Begin a batch, as OpenAI's.",
        {200: {"description": "The batch.", "content": json_of(BatchAnswer)}},
        (400, 408, 413, 429, *KNOWN),
        BATCH.schema,
    ),
    reading(
        "/v1/batches",
        "Batches, the newest first.",
        BatchList,
        *(400, 429, *KNOWN),
        parameters=(
            parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MOST_BATCHES}, "default 20"),
            _AFTER,
        ),
    ),
    reading("/v1/batches/{batch_id}", "A batch, as it is now.", BatchAnswer, *_OF_FILES),
    Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "End a batch. What is done stays.",
        {200: {"description": "As it is now.", "content": json_of(BatchAnswer)}},
        (409, *_OF_FILES),
    ),
)
