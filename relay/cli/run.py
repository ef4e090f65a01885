"""``run``: the relay itself, as a service manager starts it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

from relay import app
from relay.cli._exit_codes import CommandFailed, unwrap_exception_group
from relay.cli._options import ConfigFile
from relay.config import LoadedConfig, load
from relay.errors import ConfigError, RelayError
from relay.telemetry.log import configure_logging

_log = logging.getLogger(__name__)


def run(config: ConfigFile = None) -> None:
    """Run the relay until Ctrl-C or SIGTERM.

    When stopped, it sends what it can send at once, keeps the rest, and ends within ten seconds.
    The log goes to standard error. SIGHUP and `imds-relay reload` read the configuration again.
    """
    app.hold_hangups()
    loaded = load(config)

    def load_again() -> LoadedConfig:
        # The same file, if there was one: while it is being replaced, no other may take its place.
        return load(loaded.file or config)

    configure_logging(loaded.config.telemetry.log)
    _log.info("the configuration is %s", loaded.file or "the defaults")
    try:
        runner = asyncio.Runner()
        runner.run(app.run(loaded, load_again))
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
