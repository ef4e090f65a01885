"""Facts made up for tests, complete enough for every sink."""

from __future__ import annotations

from typing import Any

from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, digest_id

EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"

DATA: dict[str, Any] = {
    "eventId": EVENT_ID,
    "eventType": "Freeze",
    "eventStatus": "Scheduled",
    "resourceType": "VirtualMachine",
    "resources": ["WestNO_0", "WestNO_1"],
    "notBefore": "2022-04-11T22:26:58Z",
    "description": "Maintenance: påvirker «WestNO»",  # not ASCII: a signature is over bytes
    "eventSource": "Platform",
    "durationSeconds": 5,
    "documentIncarnation": 2,
    "revision": "0123456789abcdef",
}


def cloudevent(
    name: str = "event.scheduled",
    subject: str | None = EVENT_ID,
    data: dict[str, Any] | None = None,
    **attributes: str | None,
) -> CloudEvent:
    """A CloudEvent as the relay makes them; ``attributes`` replace or, with None, take away."""
    made: dict[str, str | None] = {
        "specversion": "1.0",
        "id": digest_id(name, subject, attributes, data),
        "source": "imds://prod-vmss-a-1f0c33ab",
        "type": f"{TYPE_PREFIX}{name}{TYPE_VERSION}",
        "subject": subject,
        "time": "2022-04-11T22:11:58.123456Z",
        "datacontenttype": "application/json",
        "scope": "prod-vmss-a-1f0c33ab",
        "relay": "westno-0",
        "eventtype": "Freeze",
        "eventsource": "Platform",
        "correlationid": subject,
        "partitionkey": subject,
    }
    return CloudEvent.build(
        {**made, **attributes}, {**DATA, "eventId": subject} if data is None else data
    )
