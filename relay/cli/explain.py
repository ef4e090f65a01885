"""``explain``: which rule decides about an event, what is missing, and until when."""

from __future__ import annotations

from typing import Any

from relay.cli._client import Client, with_client
from relay.cli._output import (
    format_local_time,
    join_names,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_table,
)
from relay.cli.events import AsJson, EventId


@with_client
async def explain(relay: Client, event: EventId, *, as_json: AsJson = False) -> None:
    """Say which rule decides about an event, what is missing, and until when."""
    found = await relay.get("events", event, "rule")
    if as_json:
        print_json(found)
    else:
        _show_weighed(found)


def _show_weighed(found: dict[str, Any]) -> None:
    votes = f"{found['votes']} of {pluralize(found['required'], 'vote')}"
    from_ = f", from {join_names(found['mayVote'])}" if found["mayVote"] else ""
    print_output(
        print_fields(
            [
                ("event", found["eventId"]),
                ("not before", format_local_time(found["notBefore"])),
                (
                    "approval",
                    found["state"]
                    + ("" if found["mode"] == "on" else f"; approvals are {found['mode']}"),
                ),
                (
                    "decided by",
                    f"rule {found['rule']}" if found["rule"] else "no rule: it is not approved",
                ),
                ("votes", votes if found["required"] else None),
                (
                    "missing",
                    f"{pluralize(found['missing'], 'vote')}{from_}" if found["missing"] else None,
                ),
                (
                    "nobody yet",
                    f"speaks for {join_names(found['uncoveredResources'])}"
                    if found["uncoveredResources"]
                    else None,
                ),
                (
                    "voting",
                    f"closes {format_local_time(found['closes'])}"
                    if found["required"] and found["closes"]
                    else None,
                ),
                (
                    "granted",
                    f"and void unless it is sent until {format_local_time(found['lapses'])}"
                    if found["lapses"]
                    else None,
                ),
                *(
                    (
                        "vote",
                        f"{one['principal']}, good until {format_local_time(one['until']) or 'NotBefore'}",
                    )
                    for one in found["voted"]
                ),
                *(
                    (
                        "held by",
                        f"{one['principal']} until {format_local_time(one['until'])}; {found['holdMeans']}",
                    )
                    for one in found["holds"]
                ),
            ]
        )
    )
    print_output("")
    rows = [
        (
            one["name"],
            "decides"
            if one["decides"]
            else f"does not match: {join_names(one['unmet'])}"
            if one["unmet"]
            else "comes after",
            format_local_time(one["turns"]),
        )
        for one in found["rules"]
    ]
    print_table(("rule", "why", "hours turn"), rows, empty="no rules: nothing is approved")
