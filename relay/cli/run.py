"""``run``: the relay itself, as a service manager starts it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import typer

from relay import app
from relay.cli._exit_codes import CommandFailed, error_text, exit_code, unwrap_exception_group
from relay.cli._options import ConfigFile
from relay.config import Config, find_log_form, load
from relay.errors import ConfigError, RelayError
from relay.log_fields import with_fields
from relay.telemetry import TelemetrySettings
from relay.telemetry.log import configure_logging, flush_log

_log = logging.getLogger(__name__)


def run(config: ConfigFile = None) -> None:
    """Run the relay until Ctrl-C or SIGTERM.

    When stopped, it sends what it can send at once, keeps the rest, and ends within ten seconds.
    The log goes to standard error.
    """
    form = find_log_form(config)
    if form == "json":
        configure_logging(TelemetrySettings(log=form))
    try:
        loaded = load(config)
        configure_logging(loaded.config.telemetry, loaded.config.reveal_everything)
        form = loaded.config.telemetry.log
        _log.info("the configuration is %s", loaded.file or "the defaults")
        _run(loaded.config)
    except Exception as error:
        cause = unwrap_exception_group(error)
        if form == "json":
            code = exit_code(cause)
            for line in error_text(cause).splitlines():
                _log.critical("%s", line, extra=with_fields(exitCode=code))
            raise typer.Exit(code) from error
        flush_log()  # the caller prints the error behind it
        raise


def _run(config: Config) -> None:
    try:
        runner = asyncio.Runner()
        runner.run(app.run(config))
        # Closing the runner would wait for threads, and a DNS lookup may take minutes.
        # The store holds everything by now.
        logging.shutdown()
        os._exit(0)
    except ConfigError as error:
        if not _is_address_in_use(error):
            raise
        # Exit code 1 and not 2, because a service manager may try again.
        raise CommandFailed(
            f"{error}. Another relay may be running here. If so, choose another address"
        ) from error
    except Exception as error:
        if not isinstance(unwrap_exception_group(error), RelayError):
            # The log of a service is the only place where a traceback of a bug can be found.
            _log.critical("the relay ends because of a bug in it", exc_info=True)
        raise


def _is_address_in_use(error: ConfigError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
