"""Wiring: the parts of work that may wait, in one ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvfleet.ingress.batches.batch_leader import BatchLeaders
from kvfleet.ingress.batches.batch_records import HEADS, BatchRecords
from kvfleet.ingress.batches.batch_routes import BatchRoutes
from kvfleet.ingress.batches.file_routes import FileRoutes
from kvfleet.ingress.batches.queue_runner import QueueRunner
from kvfleet.ingress.responses.response_jobs import ResponseJobs
from kvproto.buckets import Bucket, BucketFollower
from kvproto.tasks import end
from kvproto.work_queue import WorkQueue


class Batches:
    """`is_alive` says so of other ingresses."""

    def __init__(self, jobs: ResponseJobs, bucket: Bucket, is_alive: Callable[[str], bool]) -> None:
        parts = jobs.flow.parts
        limits, client = parts.config.batches, parts.client
        records = BatchRecords(bucket, limits)
        queue = WorkQueue(client.connection, client.subjects, limits.ack_wait_s)
        self.leaders = BatchLeaders(records, queue, jobs.ingress, is_alive, lambda: parts.admission.draining)
        self.runner = QueueRunner(jobs, records, queue, limits, self.leaders.status_of)
        self.leaders.on_change = self.runner.on_change
        self.files, self.routes = FileRoutes(parts, records), BatchRoutes(parts, records)
        self._heads = BucketFollower(client.connection, bucket.name, HEADS, "batches", self.leaders.read)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._heads.connection.on_reconnect.append(self._heads.begin)
        await self._heads.begin()
        self._tasks = [
            asyncio.create_task(self.leaders.run(), name="batch-leaders"),
            asyncio.create_task(self.runner.run(), name="batch-queues"),
        ]

    async def hand_over(self) -> None:
        """To the other ingresses: this one drains."""
        await asyncio.gather(self.leaders.hand_over(), self.runner.hand_over())

    async def close(self) -> None:
        await self._heads.stop()
        await end(self._tasks)
        await self.leaders.close()
        await self.runner.close()
