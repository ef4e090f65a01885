"""``reload``: lets a running relay read its configuration again."""

from __future__ import annotations

from relay.cli._exit_codes import CommandFailed, Unprocessable
from relay.cli._options import AsJson
from relay.cli._output import print_json, print_lines
from relay.cli.client import Client, with_client
from relay.errors import ConfigError


@with_client
async def reload(relay: Client, *, as_json: AsJson = False) -> None:
    """Let the relay read its configuration again and take it over, as SIGHUP does.

    All of it or nothing: if it is wrong, or a change in it needs a restart, the earlier
    configuration stays in force. Connections that are not concerned stay. Exit code 2: the
    configuration is wrong. Exit code 1: it needs a restart, or the relay does not answer.
    """
    try:
        answer = await relay.post("reload")
    except Unprocessable as error:
        if "restartRequired" in error.problem:
            raise CommandFailed(str(error)) from error
        raise ConfigError(str(error)) from error
    if as_json:
        print_json(answer)
        return
    for change in answer["changes"]:
        print_lines(f"{change['key']} {change['change']}")
    if not answer["changes"]:
        print_lines("nothing has changed")
