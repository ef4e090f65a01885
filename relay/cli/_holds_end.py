"""``holds end``: ends a standing hold early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import Reason
from relay.cli._exit_codes import CommandFailed, NotFound
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_lines

HoldId = Annotated[str, typer.Argument(metavar="HOLD", help="Its id, or a unique beginning of it.")]


@with_client
async def end(
    relay: Client, hold: HoldId, *, reason: Reason = None, as_json: AsJson = False
) -> None:
    """End a standing hold early. Rules and votes are weighed again.

    Its author may, and whoever has the right operate.
    """
    found = await _find_hold(relay, hold)
    body = {"reason": reason} if reason else {}
    answer = await relay.post("standing-holds", found["holdId"], "end", body=body)
    if as_json:
        print_json(answer)
        return
    print_lines(
        f"standing hold {answer['holdId'][:8]} is ended: events that rules and votes allow can "
        "start within seconds"
    )


async def _find_hold(relay: Client, text: str) -> Mapping[str, Any]:
    """Return the standing hold with this id, or with this beginning. Raises CommandFailed."""
    page = await relay.get_list("standing-holds", all_pages=True)
    matching = [hold for hold in page["items"] if hold["holdId"].startswith(text.lower())]
    if len(matching) > 1:
        names = ", ".join(hold["holdId"] for hold in matching[:5])
        raise CommandFailed(f"{text!r} begins several ids: {names}. Give more of the one you mean")
    if not matching or not text:
        raise NotFound("no such standing hold that is not over; see imds-relay holds")
    found: Mapping[str, Any] = matching[0]
    return found
