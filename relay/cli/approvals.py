"""``approvals``: switches approvals on, off, or to a dry run."""

from __future__ import annotations

from typing import Literal

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_lines


@with_client
async def approvals(
    relay: Client,
    mode: Literal["on", "dry-run", "off"],
    *,
    as_json: AsJson = False,
) -> None:
    """Turn approvals on, off, or to a dry run that decides everything and sends nothing.

    The relay remembers the mode. The stricter of this mode and the configuration applies.
    """
    answer = await relay.put("approvals", "mode", body={"mode": mode})
    if as_json:
        print_json(answer)
        return
    text = f"approvals are {answer['mode']}"
    if answer["mode"] != mode:
        text += (
            f", not {mode}: the configuration is stricter (approvals.enabled, approvals.dry_run)"
        )
    print_lines(text)
