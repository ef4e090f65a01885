"""The TLS context of the listener. Reads the certificate again when its files change."""

from __future__ import annotations

import logging
import ssl
from functools import partial

from relay.api.settings import ServerTlsSettings
from relay.errors import ConfigError
from relay.file_reload import FileBackedValue
from relay.files import require_small_regular_file

_log = logging.getLogger(__name__)


def file_backed_server_context(settings: ServerTlsSettings) -> FileBackedValue[ssl.SSLContext]:
    """Return the TLS context for new connections. Raises ConfigError if the files are unusable."""
    return FileBackedValue(
        (settings.cert_file, settings.key_file, settings.client_ca_file),
        partial(make_server_context, settings),
        on_failure=lambda error: _log.warning("%s. The previous certificate stays in use", error),
    )


def make_server_context(settings: ServerTlsSettings) -> ssl.SSLContext:
    """Return the TLS context for the current files. Raises ConfigError if they are unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL 1.1 lets clients renegotiate, with another certificate and at the server's cost.
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        require_small_regular_file(settings.cert_file)
        require_small_regular_file(settings.key_file)
        # The empty password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")
    except OSError as error:
        raise ConfigError(
            f"api.tls: expected a certificate in PEM in {settings.cert_file} and its key, "
            f"not encrypted, in {settings.key_file}: {_reason(error)}"
        ) from error
    if settings.client_ca_file is None:
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        require_small_regular_file(settings.client_ca_file)
        context.load_verify_locations(settings.client_ca_file)
    except OSError as error:
        raise ConfigError(
            "api.tls.client_ca_file: expected certificates in PEM in "
            f"{settings.client_ca_file}: {_reason(error)}"
        ) from error
    return context


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__
