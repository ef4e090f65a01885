"""``holds``: lists standing holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from relay.approvals.standing_holds import describe_conditions
from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import AZURE_PROCEEDS
from relay.cli._options import AllPages, AsJson
from relay.cli._output import format_local_time, print_to_stderr
from relay.cli._tables import print_page

Over = Annotated[bool, typer.Option("--over", help="Also those that were ended or expired.")]


@with_client
async def list_holds(
    relay: Client, *, over: Over = False, all_pages: AllPages = False, as_json: AsJson = False
) -> None:
    """List standing holds: holds by conditions and for a time, also of events still to come.

    `imds-relay hold` holds one event that exists.
    """
    query = {"over": "true"} if over else {}
    page = await relay.get_list("standing-holds", all_pages=all_pages, **query)
    columns = ("hold", "state", "from", "until", "by", "events", "reason")
    print_page(page, columns, _row, empty="no standing holds", as_json=as_json)
    if page["items"] and not as_json:
        print_to_stderr(AZURE_PROCEEDS)


def _row(hold: Mapping[str, Any]) -> tuple[object, ...]:
    state = hold["state"]
    if "endedBy" in hold:
        state += f" by {hold['endedBy']}"
    return (
        hold["holdId"][:8],
        state,
        format_local_time(hold["starts"], relative=hold["state"] == "upcoming"),
        format_local_time(hold["ends"], relative=hold["state"] == "active"),
        hold["principal"],
        describe_conditions(hold),
        hold["reason"],
    )
