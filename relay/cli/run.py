"""``run``: the relay itself, as a service manager starts it.

It loads the configuration, sets the log up, and leaves the rest to `relay.app`. An error ends the
process with an exit code, and is the last line on standard error.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import typer

from relay import app
from relay.cli._options import ConfigFile
from relay.cli._output import CommandFailed, error_text, exit_code, unwrap_exception_group
from relay.config import LoadedConfig, find_log_format, load
from relay.errors import ConfigError, RelayError
from relay.logs import log_extra
from relay.process import block_sighup
from relay.telemetry import TelemetrySettings
from relay.telemetry.log import configure_logging, flush_log, is_logging_json_now

_log = logging.getLogger(__name__)


def run(config: ConfigFile = None) -> None:
    """Run the relay until Ctrl-C or SIGTERM.

    When stopped, it sends what it can send at once, keeps the rest, and ends within ten seconds.
    The log goes to standard error. SIGHUP and `imds-relay reload` read the configuration again.
    """
    block_sighup()
    form = find_log_format(config)
    if form == "json":
        configure_logging(TelemetrySettings(log=form))
    try:
        source = _ConfigSource(config)
        _log.info("the configuration is %s", source.in_force.file or "the defaults")
        _run_relay(source)
    except Exception as error:
        cause = unwrap_exception_group(error)
        if is_logging_json_now():
            code = exit_code(cause)
            for line in error_text(cause).splitlines():
                _log.critical("%s", line, extra=log_extra(exitCode=code))
            raise typer.Exit(code) from error
        flush_log()  # the caller prints the error behind it
        raise


class _ConfigSource:
    """Loads the configuration at the start and for each reload, and sets the log up as it says.

    A reload calls `load`, and `take_over` once the relay has taken the result over. In between, and
    after a reload that was refused, two configurations have secrets that no log may show.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.in_force = load(file)
        self._known = [self.in_force]
        configure_logging(self.in_force.config.telemetry, self._secrets_to_hide)

    def load(self) -> LoadedConfig:
        """Load it again, from the same file if it had one. Raises ConfigError."""
        loaded = load(self.in_force.file or self._file)
        self._known = [self.in_force, loaded]
        return loaded

    def take_over(self, loaded: LoadedConfig) -> None:
        before, self.in_force = self.in_force, loaded
        if loaded.config.telemetry != before.config.telemetry:
            configure_logging(loaded.config.telemetry, self._secrets_to_hide)

    def _secrets_to_hide(self) -> Iterator[str]:
        for loaded in self._known:
            yield from loaded.config.iter_current_secret_texts()


def _run_relay(source: _ConfigSource) -> None:
    """Run the relay, and end the process with code 0. Raises what ended the relay early."""
    try:
        runner = asyncio.Runner()
        runner.run(app.run(source.in_force, source.load, on_reload=source.take_over))
        # Closing the runner would wait for threads, and a DNS lookup may take minutes.
        # The store holds everything by now.
        logging.shutdown()
        os._exit(0)
    except ConfigError as error:
        cause = error.__cause__
        remedies = {
            errno.EADDRINUSE: "Another relay may be running here. If so, choose another address",
            errno.EADDRNOTAVAIL: "Choose another address, or make sure that the interface is up",
        }
        if not isinstance(cause, OSError) or cause.errno not in remedies:
            raise
        # Exit code 1 and not 2, because a service manager may try again.
        raise CommandFailed(f"{error}. {remedies[cause.errno]}") from error
    except Exception as error:
        if not isinstance(unwrap_exception_group(error), RelayError):
            # The log of a service is the only place where a traceback of a bug can be found.
            _log.critical("the relay ends because of a bug in it", exc_info=True)
        raise
