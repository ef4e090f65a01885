"""``show``: one event with its history, votes and deliveries."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_lookup import call_about_event
from relay.cli._event_text import cloudevent_row, event_fields
from relay.cli._options import AllPages, AsJson, EventId, Scope
from relay.cli._output import format_local_time, print_json, print_lines, print_to_stderr
from relay.cli._tables import print_fields, print_table
from relay.events.cloudevent import event_name


@with_client
async def show(
    relay: Client,
    event: EventId,
    *,
    scope: Scope = None,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """Show one event: its history, votes and deliveries, the newest of each.

    --all shows the whole history.
    """
    details = await call_about_event(
        relay,
        event,
        scope,
        lambda event_id, query: relay.get_details_with_log(
            "events", event_id, log="history", all_pages=all_pages, **query
        ),
    )
    if as_json:
        print_json(details)
        return
    votes = [
        (
            format_local_time(vote["at"], relative=False),
            vote["decision"],
            vote["principal"],
            vote["channel"],
            "counts" if vote["counts"] else "counts no more",
        )
        for vote in details["votes"]
    ]
    history = [cloudevent_row(cloudevent) for cloudevent in details["history"]]
    deliveries = [
        (
            event_name(delivery["type"]),
            delivery["sink"],
            delivery["state"],
            delivery["attempts"],
            delivery["reason"],
        )
        for delivery in details["deliveries"]
    ]
    print_fields(event_fields(details))
    print_lines("")
    print_table(
        ("decided", "what", "by", "through", "still"), votes, empty="nobody has decided anything"
    )
    print_lines("")
    print_table(("told", "what", "by", "detail"), history, empty="nothing was told")
    print_lines("")
    print_table(
        ("delivery of", "to", "state", "tries", "reason"),
        deliveries,
        empty="nothing was sent: no sink wants it",
    )
    if details.get("next") is not None:
        print_to_stderr("more happened before: --all")
