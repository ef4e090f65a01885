"""The calls that the relay makes to the metadata service, and the search for the service.

The poller reads the document of events, the `StartRequestPort` sends StartRequests, and the start
of the relay reads instance metadata. All of them share one `ImdsClient`, so they share its budget
of calls (`relay.imds.calls`). With ``source.url: discover`` the client also finds out where the
service is, with the candidates of `relay.imds.discover`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import orjson
from typing_extensions import override  # in typing from Python 3.12

from relay.clock import Clock
from relay.errors import SourceError, SourceUnavailable
from relay.imds import DISCOVER, SourceSettings
from relay.imds.calls import Call, DatedBody, ImdsSession
from relay.imds.discover import VIRTUAL_NETWORK, Candidate, CandidateFinder
from relay.imds.document import parse_document
from relay.net.egress import add_refused_imds_address, remove_refused_imds_address

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to a place where the service may be."""
SEARCH_AFTER = 15.0
"""Seconds without a usable answer after which a service that was found is searched again."""

_log = logging.getLogger(__name__)


class ImdsClient(ImdsSession):
    """The calls of the relay. They may overlap.

    Every method waits until it may call, in order of arrival. The timeout of the settings covers
    the whole call after that. Every method raises the errors of `ImdsSession.send`.

    With ``source.url: discover`` the first read searches the service: the first candidate of
    ``finder`` that answers with a document. It is searched again after `SEARCH_AFTER` seconds
    without a usable answer. While it is known, no sink can connect to its address.
    """

    def __init__(
        self, settings: SourceSettings, clock: Clock, finder: CandidateFinder | None = None
    ) -> None:
        super().__init__(clock)
        self._settings = settings
        self._finder = finder or CandidateFinder(clock) if settings.url == DISCOVER else None
        self._found: Candidate | None = None
        self._failing_since = math.inf  # monotonic
        self._has_answered = False

    def use_source_settings(self, settings: SourceSettings) -> None:
        self._settings = settings

    @override
    async def __aexit__(self, *_: object) -> None:
        self._use_candidate_endpoint(None)
        await super().__aexit__()

    @property
    def base_url(self) -> str | None:
        if self._finder is None:
            return self._settings.url
        return self._found.base_url if self._found is not None else None

    @property
    def is_outside_virtual_network(self) -> bool:
        """Whether the service was found at another address than that in a virtual network."""
        return self._found is not None and self._found.address != VIRTUAL_NETWORK

    async def read_document(self) -> DatedBody:
        """Return the body of the Scheduled Events document with the service's time."""
        if self._finder is None:
            return await self._read_from(self._settings.url)
        failing = self._clock.monotonic() - self._failing_since
        if self._found is None or failing >= SEARCH_AFTER:
            return await self._search(self._finder)
        try:
            read = await self._read_from(self._found.base_url)
            parse_document(read.body)  # another service may answer at that address by now
        except SourceError as error:
            if error.status != 429:  # it works, others poll too
                self._failing_since = min(self._failing_since, self._clock.monotonic())
            raise
        self._failing_since = math.inf
        return read

    async def _search(self, finder: CandidateFinder) -> DatedBody:
        """Use the first candidate that has a document. Raises SourceUnavailable if none has."""
        problems = []
        async with contextlib.aclosing(finder.candidates()) as candidates:
            async for candidate in candidates:
                try:
                    read = await self._read_from(candidate.base_url, CONNECT_TIMEOUT)
                    parse_document(read.body)
                except SourceError as error:
                    problems.append(f"{candidate.base_url} ({candidate.reason}): {error.reason}")
                    continue
                self._use_candidate_endpoint(candidate)
                return read
        self._failing_since = self._clock.monotonic()
        raise SourceUnavailable(
            f"found no metadata service: {'; '.join([*problems, *finder.problems])}"
        )

    def _use_candidate_endpoint(self, candidate: Candidate | None) -> None:
        self._failing_since = math.inf
        if candidate == self._found:
            return
        if self._found is not None:
            remove_refused_imds_address(self._found.address)
        if candidate is not None:
            add_refused_imds_address(candidate.address)
            _log.info("the metadata service is at %s, %s", candidate.base_url, candidate.reason)
        self._found = candidate

    async def _read_from(self, url: str, connect_timeout: float | None = None) -> DatedBody:
        # The first call can take two minutes: docs/protocol.md#the-first-call
        timeout = self._settings.timeout if self._has_answered else self._settings.first_timeout
        call = self._events_call(url, timeout=timeout, connect_timeout=connect_timeout)
        read = await self.send(call)
        self._has_answered = True
        return read

    def _events_call(self, url: str, **options: Any) -> Call:
        query = {"api-version": self._settings.api_version}
        return Call(origin=url, path="/metadata/scheduledevents", query=query, **options)

    async def send_start_request(
        self, event_id: str, *, seconds_left: Callable[[], float] | None = None
    ) -> None:
        """Ask Azure to start an event now. Return when it answered 200.

        The EventId is sent in the case in which it is given. Azure answers 200 for every valid one
        (docs/protocol.md#startrequests). ``seconds_left`` is the deadline, as for `Call`.
        """
        body = orjson.dumps({"StartRequests": [{"EventId": event_id}]})
        if self.base_url is None:
            raise SourceUnavailable("expected a metadata service, none is found yet")
        timeout = self._settings.timeout
        await self.send(
            self._events_call(self.base_url, timeout=timeout, body=body, seconds_left=seconds_left)
        )

    async def read_instance_metadata_body(self) -> bytes:
        if self._finder is not None and self._found is None:
            await self._search(self._finder)
        call = Call(
            origin=self.base_url or self._settings.url,
            path="/metadata/instance",
            query={"api-version": "2021-02-01", "format": "json"},
            timeout=self._settings.timeout,
        )
        return (await self.send(call)).body
