"""The store: runs every transaction on the state file in one thread, grouped under load.

Other packages give their work to `Store`, as functions that get a `Transaction`. The role opens the
store with `open_store`. While the file cannot be written, two kinds of work differ:

- Work that *fails closed* (approvals) is refused with StoreUnavailable. That is how `Store.submit`
  and `Store.transact` run work by default.
- Work that *fails open* (events, deliveries, all that only reads) runs in a transaction that stays
  open: SQLite keeps the pages that it changes in memory, and reads all others from the file. Its
  results go out at once, and nothing follows from them yet. The transaction is committed once the
  file can be written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from relay.clock import Clock, Histogram
from relay.errors import StoreUnavailable
from relay.store import Entry, RecordedEvent, StateFileScopeAndVm, StoreSettings
from relay.store.approvals import Memory
from relay.store.file import StateFile, is_file_error, open_state_file
from relay.store.transaction import FollowUp, Route, Transaction

T = TypeVar("T")
Work = Callable[[Transaction], T]
"""What is done in one transaction. It may run more than once, after what it did was rolled back.

So what else it changes must be right after a rollback, too, as a cache is, a count of refusals
that may be too high, or rules by which earlier work is then judged as well.
"""
MAX_JOBS_PER_COMMIT = 512
MIN_RECOVERY_INTERVAL = 1.0
"""Seconds between two tries to write a file that could not be written."""
_COMMIT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Seconds: the buckets of transactions."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Listeners:
    """Functions that the store calls on the event loop after each commit."""

    recorded: list[Callable[[Sequence[RecordedEvent]], None]] = field(default_factory=list)
    redelivered: list[Callable[[Sequence[Entry]], None]] = field(default_factory=list)
    write_error_changed: list[Callable[[str | None], None]] = field(default_factory=list)
    """Called with the reason if the file cannot be written, and with None when it can again."""


@contextlib.contextmanager
def listening(listeners: list[T], listener: T) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work that waits or ran. Its route is that of the moment of submission."""

    work: Work[Any]
    route: Route
    fail_open: bool = True
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None
    recorded: Sequence[RecordedEvent] = ()
    redelivered: Sequence[Entry] = ()

    def run(self, transaction: Transaction) -> bool:
        """Do the work. Return False if it raised its own error: the caller must undo the work."""
        transaction.route = self.route
        try:
            self.result = self.work(transaction)
        except Exception as error:  # whoever submitted the work gets it
            if is_file_error(error):
                raise
            # A future takes no StopIteration, and the jobs after this one would get no results.
            self.error = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            return False
        self.error = None
        self.recorded, self.redelivered = transaction.finish()
        return True


class Store:
    def __init__(self, state_file: StateFile, route: Route, settings: StoreSettings) -> None:
        self.settings = settings
        self.trusted = state_file.trusted
        """See `relay.store.file.StateFile`. If it is False, the role leaves approvals off."""
        self.write_error: str | None = None
        """Why the file cannot be written; None while it can."""
        self.commit_seconds = Histogram(_COMMIT_BOUNDS)
        self.listeners = Listeners()
        self.follow_up: FollowUp | None = None
        """Records in each transaction on the file what follows from what was recorded there. It is
        left out while the file cannot be written: approvals fail closed."""
        self._state_file = state_file
        self.route = route
        """Says which sinks want an event, for all work submitted from now on."""
        self._loop = asyncio.get_running_loop()
        self._memory = Memory(state_file.damaged)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._uncommitted: sqlite3.Connection | None = None  # while the file cannot be written
        self._uncommitted_work: list[tuple[Work[Any], Route]] = []  # that changed something
        self._recover_at = 0.0
        self._thread = threading.Thread(target=self._run_thread, name="store", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T], *, fail_open: bool = False) -> asyncio.Future[T]:
        """Queue work; jobs run in the order of submission.

        The future holds what the work returned or raised. While the file cannot be written, it
        raises StoreUnavailable and nothing was done. With ``fail_open`` this happens only if the
        file cannot be read either.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self._is_closed:
            error = StoreUnavailable("the state file was closed: the relay is stopping")
            future.set_exception(error)
        else:
            self._jobs.put(_Job(work, self.route, fail_open, future))
        return future

    async def transact(self, work: Work[T], *, fail_open: bool = False) -> T:
        """Submit work and wait for it; see `submit`. To cancel the wait does not stop the work."""
        return await asyncio.shield(self.submit(work, fail_open=fail_open))

    async def read(self, work: Work[T]) -> T:
        """Run work that writes nothing."""
        return await self.transact(work, fail_open=True)

    async def close(self) -> None:
        self._is_closed = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- on the thread

    def _run_thread(self) -> None:
        failure: str | None = None
        is_open = True
        while is_open:
            jobs, is_open = self._dequeue(may_recover=failure is None)
            try:
                if failure is None:
                    if self.write_error is not None and (
                        not is_open or time.monotonic() >= self._recover_at
                    ):
                        self._try_to_recover()
                    is_uncommitted = self._uncommitted is not None or self._uncommitted_work
                    if is_uncommitted or not self._commit_jobs(jobs):
                        self._run_without_commit(jobs)
            except Exception as error:  # noqa: BLE001  # every waiter must get an answer
                _log.critical(
                    "the thread of the state file has failed; nothing more can be recorded",
                    exc_info=error,
                )
                failure = f"the thread of the state file has failed: {error!r}"
                self._set_write_error(failure)
            if failure is not None:
                for job in jobs:
                    job.error = StoreUnavailable(failure)
            self._call_on_loop(partial(_resolve_futures, jobs, self.listeners))
            jobs = []  # do not keep their results while waiting for the next ones
        if self._uncommitted_work:
            _log.error(
                "the state file could still not be written: %s. "
                "What happened meanwhile was sent from memory",
                self.write_error,
            )
        self._roll_back_uncommitted()
        self._state_file.close()

    def _dequeue(self, *, may_recover: bool) -> tuple[list[_Job], bool]:
        """Wait for jobs and return those that are queued; False: they are the last ones."""
        jobs: list[_Job] = []
        seconds: float | None = None
        if self.write_error is not None and may_recover:
            seconds = max(0.0, self._recover_at - time.monotonic())
        try:
            job = self._jobs.get(timeout=seconds)
            while job is not None:
                jobs.append(job)
                if len(jobs) == MAX_JOBS_PER_COMMIT:
                    break
                job = self._jobs.get_nowait()
            return jobs, job is not None
        except queue.Empty:
            return jobs, True

    def _try_to_recover(self) -> None:
        # A commit that fails rolls back, and all work must be repeated: so not too often.
        file = self._state_file.connection
        began = time.monotonic()
        try:
            if self._uncommitted is not file:
                self._begin_on_file()
                self._roll_back_uncommitted()  # of a copy
                self._repeat_uncommitted_work(file)
            file.execute("COMMIT")
        except sqlite3.Error as error:
            if self._uncommitted is file:
                self._roll_back_uncommitted()
            self._set_write_error(str(error))
        else:
            self.commit_seconds.observe(time.monotonic() - began)
            self._uncommitted, self._uncommitted_work = None, []
            self._memory.is_loaded = False  # events can have ended, and nothing followed yet
            self._set_write_error(None)
        elapsed = time.monotonic() - began
        self._recover_at = time.monotonic() + max(MIN_RECOVERY_INTERVAL, 10 * elapsed)

    def _roll_back_uncommitted(self) -> None:
        if self._uncommitted is self._state_file.connection:
            _roll_back(self._uncommitted)
        elif self._uncommitted is not None:
            self._uncommitted.close()
        self._uncommitted = None

    def _repeat_uncommitted_work(self, connection: sqlite3.Connection) -> None:
        """Do again what was done in a transaction that was lost, or nothing: sqlite3.Error."""
        self._uncommitted = connection
        try:
            for done in self._uncommitted_work.copy():
                job = _Job(*done)
                self._run_in_savepoint(job, self._make_transaction(connection))
                if job.error is not None:
                    self._uncommitted_work.remove(done)
                    text = "what was sent from memory could not be recorded afterwards"
                    _log.error(text, exc_info=job.error)
        except sqlite3.Error:
            self._roll_back_uncommitted()
            raise

    def _commit_jobs(self, jobs: Sequence[_Job]) -> bool:
        """Run jobs in one transaction on the file. Return whether it could be written."""
        connection = self._state_file.connection
        began = time.monotonic()
        try:
            connection.execute("BEGIN IMMEDIATE")
            # Try without a savepoint for each job: those are a third of the statements, and jobs
            # rarely raise an error.
            memory = self._memory
            transaction = self._make_transaction(connection, memory)
            if all(job.run(transaction) for job in jobs):
                memory = transaction.memory
            else:
                connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    transaction = self._make_transaction(connection, memory)
                    if self._run_in_savepoint(job, transaction):
                        memory = transaction.memory
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(connection)
            self._set_write_error(str(error))
            return False
        self._memory = memory
        self.commit_seconds.observe(time.monotonic() - began)
        return True

    def _make_transaction(
        self, connection: sqlite3.Connection, memory: Memory | None = None
    ) -> Transaction:
        keys, memory = self._state_file.keys, memory or self._memory
        follow_up = self.follow_up if self._uncommitted is None else None
        return Transaction(connection, self.route, keys, memory=memory, follow_up=follow_up)

    def _run_in_savepoint(self, job: _Job, transaction: Transaction) -> bool:
        """Do the work of a job, so that its own error undoes only this work; False: it did."""
        connection = transaction.connection
        connection.execute("SAVEPOINT work")
        is_done = False
        try:
            is_done = job.run(transaction)
        finally:
            if connection.in_transaction:  # SQLite rolls all back by itself after some errors
                if not is_done:
                    connection.execute("ROLLBACK TO work")
                connection.execute("RELEASE work")
        return is_done

    def _run_without_commit(self, jobs: list[_Job]) -> None:
        """Refuse jobs that fail closed. Run the others in a transaction that stays open."""
        for job in jobs:
            if not job.fail_open:
                reason = f"the state file cannot be written: {self.write_error}"
                job.error = StoreUnavailable(reason)
                continue
            try:
                connection = self._begin_uncommitted()
                before = connection.total_changes
                self._run_in_savepoint(job, self._make_transaction(connection))
            except sqlite3.Error as error:
                if self._uncommitted is not None and not self._uncommitted.in_transaction:
                    self._roll_back_uncommitted()  # the next job repeats what was done before
                job.error = StoreUnavailable(
                    f"the state file can be neither written nor read: {self.write_error}; {error}"
                )
                continue
            if job.error is None and connection.total_changes != before:
                self._uncommitted_work.append((job.work, job.route))

    def _begin_uncommitted(self) -> sqlite3.Connection:
        """Return the connection whose transaction has what was done since the last commit.

        If none can be begun on the file, because another program holds its lock, that is a copy. It
        is on disk: the file can be large.
        """
        if self._uncommitted is not None:
            return self._uncommitted
        connection = self._state_file.connection
        try:
            self._begin_on_file()
        except sqlite3.Error:
            connection = sqlite3.connect("", isolation_level=None)  # a temporary file
            self._uncommitted = connection  # closed if what follows fails
            self._state_file.connection.backup(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("BEGIN")
        self._repeat_uncommitted_work(connection)
        return connection

    def _begin_on_file(self) -> None:
        """Begin a transaction; fail at once if another program holds the lock."""
        file = self._state_file.connection
        timeout = file.execute("PRAGMA busy_timeout").fetchone()[0]
        file.execute("PRAGMA busy_timeout = 0")
        try:
            file.execute("BEGIN IMMEDIATE")
            # An empty transaction writes nothing, so its commit would succeed on a full disk.
            file.execute("INSERT OR REPLACE INTO meta VALUES ('probe', hex(randomblob(4)))")
        except sqlite3.Error:
            _roll_back(file)
            raise
        finally:
            file.execute(f"PRAGMA busy_timeout = {timeout}")

    def _set_write_error(self, reason: str | None) -> None:
        was_writable, self.write_error = self.write_error is None, reason
        if was_writable != (reason is None):
            self._call_on_loop(
                lambda: [listener(reason) for listener in self.listeners.write_error_changed]
            )

    def _call_on_loop(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback)


def _resolve_futures(jobs: Sequence[_Job], listeners: Listeners) -> None:
    for job in jobs:
        if job.error is None:
            try:
                for on_recorded in listeners.recorded if job.recorded else ():
                    on_recorded(job.recorded)
                for on_redelivered in listeners.redelivered if job.redelivered else ():
                    on_redelivered(job.redelivered)
            except Exception as error:  # noqa: BLE001  # whoever submitted the work gets it
                job.error = error
        if job.future is None or job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:  # SQLite rolls back by itself after some errors
            connection.execute("ROLLBACK")


@contextlib.asynccontextmanager
async def open_store(
    settings: StoreSettings, identity: StateFileScopeAndVm, clock: Clock, route: Route
) -> AsyncIterator[Store]:
    """Open the state file for the time of this context; see `open_state_file` for errors."""
    state_file = await asyncio.to_thread(open_state_file, settings.path, identity, clock.now())
    store = Store(state_file, route, settings)
    try:
        yield store
    finally:
        await store.close()
