"""``dead-letters``: lists the deliveries that the relay has given up."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import AllPages, AsJson
from relay.cli.deliveries import print_deliveries


@with_client
async def dead_letters(
    relay: Client, *, all_pages: AllPages = False, as_json: AsJson = False
) -> None:
    """List the deliveries that were given up, and why. `imds-relay redeliver` sends one again."""
    page = await relay.get_first_or_all_pages("dead-letters", all_pages=all_pages)
    print_deliveries(page, empty="no dead letters", as_json=as_json)
