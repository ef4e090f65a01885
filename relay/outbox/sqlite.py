"""Keeps the state file: one thread runs every transaction, grouped under load, and carries on in memory while the disk fails.

Work that *fails closed* (approvals) is either on disk or refused with StoreUnavailable. Work that *fails open* (what was
seen, what was delivered) is done in any case: while the file cannot be written it runs on a copy in memory, its effects
go out from there, and it is run again on the file, in the same order, once that works. Work that only *reads* sees
whichever of the two is newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.outbox import Entry, Identity, RecordedEvent, StoreSettings
from relay.outbox.file import StateFile, open_state_file
from relay.outbox.job import Job, Work
from relay.outbox.transaction import Route, Transaction

T = TypeVar("T")
_GROUP = 512
_RETRY = 1.0
_log = logging.getLogger(__name__)


def _probe(transaction: Transaction) -> None:
    # An empty transaction writes nothing, so it would succeed on a full disk.
    transaction.set_meta("probe", secrets.token_hex(4))


@dataclass(slots=True)
class Listeners:
    """Who is told, on the event loop, of what was recorded: the dispatcher, and streams of the API."""

    recorded: list[Callable[[Sequence[RecordedEvent]], None]] = field(default_factory=list)
    redelivered: list[Callable[[Sequence[Entry]], None]] = field(default_factory=list)
    write_error_changed: list[Callable[[str | None], None]] = field(default_factory=list)
    """Called with the reason when the file cannot be written, with None when it can again."""


class Store:
    """The state file in use. Made by `open_store`."""

    def __init__(self, opened: StateFile, route: Route, settings: StoreSettings) -> None:
        self.settings = settings
        self.trusted = opened.trusted
        """False: the store is bound to a VM that this one could not be compared with; approvals stay off."""
        self.write_error: str | None = None
        """Why the file cannot be written now; None while it can."""
        self.listeners = Listeners()
        self._opened = opened
        self._route = route
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._pending: list[Work[Any]] = []  # done in memory, to be done on the file
        self._memory: sqlite3.Connection | None = None
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T], *, fail_open: bool = False) -> asyncio.Future[T]:
        """Queue work; jobs run in the order of submission. The future holds what the work returned, or raised.

        Without ``fail_open`` it ends in StoreUnavailable, with nothing done, while the file cannot be written. With it,
        only if the file cannot be read either.
        """
        return self._put(work, "open" if fail_open else "closed")

    async def transact(self, work: Work[T], *, fail_open: bool = False) -> T:
        """As `submit`, and wait. Cancelling the wait does not stop the work."""
        return await asyncio.shield(self.submit(work, fail_open=fail_open))

    async def read(self, work: Work[T]) -> T:
        """Run work that writes nothing."""
        return await asyncio.shield(self._put(work, "read"))

    def _put(self, work: Work[T], fails: Literal["open", "closed", "read"]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(
                StoreUnavailable("the state file was closed: the relay is stopping")
            )
        else:
            self._jobs.put(Job(work, fails, future))
        return future

    async def close(self) -> None:
        """Run what was submitted, and close the file."""
        self._closed = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- the thread

    def _run(self) -> None:
        jobs: list[Job] = []
        open_ = True
        try:
            while open_:
                jobs, open_ = self._next()
                self._commit(jobs, last=not open_)
                jobs = []  # else what they said would stay in memory until there are others
            if self._pending:
                _log.error(
                    "the state file could still not be written: %s. What was seen meanwhile was sent from memory",
                    self.write_error,
                )
        except Exception as error:  # noqa: BLE001  # whoever waits for an answer must get one, whatever happened
            _log.critical(
                "the thread that keeps the state file has failed; nothing more can be recorded",
                exc_info=error,
            )
            self._set_failing(f"the thread that keeps the state file has failed: {error!r}")
            self._refused(jobs, self.write_error or "")
            while open_ and (job := self._jobs.get()) is not None:
                self._refused([job], self.write_error or "")
        finally:
            if self._memory is not None:
                self._memory.close()
            self._opened.close()

    def _next(self) -> tuple[list[Job], bool]:
        """Wait for work: all that is there, up to a limit; False: it is the last."""
        jobs: list[Job] = []
        try:
            job = self._jobs.get(
                timeout=max(0.0, self._retry_at - time.monotonic())
                if self.write_error is not None
                else None
            )
            while job is not None:
                jobs.append(job)
                if len(jobs) == _GROUP:
                    break
                job = self._jobs.get_nowait()
            return jobs, job is not None
        except queue.Empty:
            return jobs, True

    def _commit(self, jobs: list[Job], *, last: bool) -> None:
        if self.write_error is not None and (last or time.monotonic() >= self._retry_at):
            self._recover()
        if self._memory is None and self._try_on_disk(jobs):
            self._done(jobs)
        else:
            self._in_memory(jobs)

    def _recover(self) -> None:
        """Try whether the file can be written again, and write what was done in memory."""
        began = time.monotonic()
        again = [Job(work, "open") for work in self._pending]
        if self._try_on_disk([Job(_probe, "closed")]) and self._try_on_disk(again):
            for job in again:
                if job.error is not None:
                    _log.error(
                        "what was sent from memory could not be written down afterwards",
                        exc_info=job.error,
                    )
            if self._memory is not None:
                self._memory.close()
            self._memory, self._pending = None, []
            self._set_failing(None)
        self._retry_at = time.monotonic() + max(_RETRY, 10 * (time.monotonic() - began))

    def _try_on_disk(self, jobs: Sequence[Job]) -> bool:
        connection = self._opened.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            # A savepoint for each is a third of the statements, and hardly any work raises an error.
            transaction = Transaction(connection, self._route)
            if not all(job.attempt(transaction) for job in jobs):
                connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    job.run(connection, self._route)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(
                sqlite3.Error
            ):  # SQLite has rolled back by itself after some errors
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            self._set_failing(str(error))
            return False
        return True

    def _in_memory(self, jobs: list[Job]) -> None:
        """Refuse what fails closed; do what fails open on a copy in memory, and keep it for the file."""
        for job in jobs:
            if job.fail_mode == "closed":
                job.error = StoreUnavailable(f"the state file cannot be written: {self.write_error}")
                continue
            try:
                if self._memory is None:
                    self._memory = self._copy()
                job.run(self._memory, self._route)
            except sqlite3.Error as error:
                job.error = StoreUnavailable(
                    f"the state file can be neither written nor read: {self.write_error}; {error}"
                )
            if job.fail_mode == "open" and job.error is None:
                self._pending.append(job.work)
        self._done(jobs)

    def _copy(self) -> sqlite3.Connection:
        memory = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._opened.connection.backup(memory)
            memory.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error:
            memory.close()
            raise
        return memory

    def _refused(self, jobs: Sequence[Job], why: str) -> None:
        for job in jobs:
            job.error = StoreUnavailable(why)
        self._done(jobs)

    def _set_failing(self, reason: str | None) -> None:
        before, self.write_error = self.write_error, reason
        if (reason is None) != (before is None):
            self._on_loop(lambda: [listener(reason) for listener in self.listeners.write_error_changed])

    def _done(self, jobs: Sequence[Job]) -> None:
        self._on_loop(lambda: self._tell(jobs))

    def _on_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback)

    # --- the loop

    def _tell(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.error is None:
                try:
                    self._hand_out(job)
                except Exception as error:  # noqa: BLE001  # it is for whoever submitted the work, and nobody waits in vain
                    job.error = error
            if job.future is None or job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)

    def _hand_out(self, job: Job) -> None:
        if job.recorded:
            for listener in self.listeners.recorded:
                listener(job.recorded)
        if job.redelivered:
            for revival in self.listeners.redelivered:
                revival(job.redelivered)


@contextlib.asynccontextmanager
async def open_store(
    settings: StoreSettings, identity: Identity, clock: Clock, route: Route
) -> AsyncIterator[Store]:
    """The state file, open. Raises what `relay.outbox.file.open_state_file` raises."""
    opened = await asyncio.to_thread(open_state_file, settings.path, identity, clock.now())
    store = Store(opened, route, settings)
    try:
        yield store
    finally:
        await store.close()
