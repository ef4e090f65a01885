"""``run``: the relay itself, as a service starts it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from relay import app
from relay.cli._exit_codes import CommandFailed, unwrap_group
from relay.config import load
from relay.errors import ConfigError, RelayError
from relay.telemetry.log import set_up

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration. Without it: $IMDS_RELAY_CONFIG, else ./relay.yaml, else /etc/imds-relay/relay.yaml, else the defaults.",
    ),
]
_log = logging.getLogger(__name__)


def run(config: ConfigFile = None) -> None:
    """Run the relay, until Ctrl-C or SIGTERM.

    It sends what can be sent at once, keeps the rest, and ends within ten seconds. Its log is on standard error.
    """
    loaded = load(config)
    set_up(loaded.config.telemetry.log)
    _log.info("the configuration is %s", loaded.file or "the defaults")
    try:
        runner = asyncio.Runner()
        runner.run(app.run(loaded.config))
        # Not closed: that waits for threads, and one that looks up a name may take minutes. All is on disk.
        logging.shutdown()
        os._exit(0)
    except ConfigError as error:
        if not _is_taken(error):
            raise
        # No wrong configuration: a service manager may try again.
        raise CommandFailed(
            f"{error}. Does another relay run here already? Else choose another address"
        ) from error
    except Exception as error:
        if not isinstance(unwrap_group(error), RelayError):
            # The one place that shows a traceback: nobody watches a service, and its log is where a mistake is looked for.
            _log.critical("the relay ends because of a mistake of its own", exc_info=True)
        raise


def _is_taken(error: ConfigError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
    )
