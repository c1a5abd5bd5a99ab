"""The names that a worker takes requests under, and what of its blocks is whose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvfleet.worker.serve.served_models import ServedModels
from kvproto.block_hash import TenantRoots
from kvproto.errors import ModelNotFound, Unavailable
from kvproto.messages import Adapter, State, WorkerRecord

RED = Adapter("red", "r1")
RECORD = WorkerRecord("w1", "e", "l", State.READY, "m", "", "h", 1, (1, 1), model_revision="rev", adapters=(RED,))
IDS = tuple(range(32))


def root_of(lora: str) -> object:
    return TenantRoots("rev", 16, (), b"key", lora).of("a", IDS)


def test_what_is_loaded_is_served_and_what_never_was_is_refused_by_name() -> None:
    models = ServedModels(RECORD, b"key")
    for name in ("m", "red"):
        models.check(name, new=True)
    with pytest.raises(ModelNotFound, match="serves 'm', not 'blue'"):
        models.check("blue", new=True)
    assert (models.adapter("m"), models.adapter("red")) == ("", "red")
    assert (models.root("m", "a", IDS), models.root("red", "a", IDS)) == (root_of(""), root_of("red@r1"))


def test_what_was_unloaded_takes_nothing_new_but_what_runs_is_known() -> None:
    """Another worker may have it, so the refusal is retryable."""
    models = ServedModels(RECORD, b"key")
    models.put(())
    with pytest.raises(Unavailable, match="'red' no longer"):
        models.check("red", new=True)
    models.check("red", new=False)
    assert models.root("red", "a", IDS) == root_of("red@r1")
    models.put((RED,))
    models.check("red", new=True)


def test_all_that_ever_had_a_name_can_be_erased() -> None:
    models = ServedModels(RECORD, b"key")
    models.put((replace(RED, revision="r2"),))
    models.put((replace(RED, revision="r2"),))
    assert models.root("red", "a", IDS) == root_of("red@r2")
    assert models.all_roots("red", "a", IDS) == [root_of("red@r1"), root_of("red@r2")]
    assert models.all_roots("", "a", IDS) == models.all_roots("m", "a", IDS) == [root_of("")]
    assert models.all_roots("blue", "a", IDS) == []
