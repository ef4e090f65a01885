"""What a caller may say with a decision, for the audit. Nothing is decided by it.

A remark is a field of the request (`relay.approvals.request.DecisionBody`), of the events about the
decision, and of the votes that the API lists. It is kept, and shown wherever the decision is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12


class Remarks(TypedDict):
    """Why somebody decided."""

    reason: Annotated[str | None, Field(description="the reason that the caller gave")]
    ticket: Annotated[
        str | None, Field(description="the change or ticket that the caller named, as CHG-1234")
    ]


def remarks_in(data: Mapping[str, Any]) -> Remarks:
    """Return the remarks among other fields; those that are not there are None."""
    return cast("Remarks", {name: data.get(name) for name in Remarks.__annotations__})


NO_REMARKS = remarks_in({})


def describe_remarks(data: Mapping[str, Any], *, quote: str = "{}") -> Iterator[str]:
    """Yield the remarks for people. ``quote`` is how the reason is written, such as ``“{}”``."""
    for name in Remarks.__annotations__:
        if text := data.get(name):
            yield quote.format(text) if name == "reason" else f"{name} {text}"
