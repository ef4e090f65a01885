"""The ``tls`` section of a receiver: the CAs that are trusted, and the relay's own certificate.

The files are read when the configuration is checked, so that an unusable file is found then. A
running sink reads them again when they change.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import model_validator

from relay.file_reload import FileBackedValue
from relay.files import describe_os_error, require_small_regular_file
from relay.net.tls_context import client_context, load_client_certificate
from relay.settings import Section


class ClientTlsSettings(Section):
    """Certificates for one receiver."""

    ca_file: Path | None = None
    """The trusted CAs, PEM. They replace those of this machine."""
    cert_file: Path | None = None
    """The sink's own certificate with its chain, PEM."""
    key_file: Path | None = None
    """Its private key, PEM without a passphrase. Not needed if cert_file contains it."""

    @model_validator(mode="after")
    def _check_files(self) -> ClientTlsSettings:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("cert_file: expected a certificate for key_file, got none")
        self.make_context()
        return self

    def make_context(self) -> ssl.SSLContext:
        """Return a context made of the files as they are now.

        Raises ValueError, which names the file and repeats nothing of its content.
        """
        option = "ca_file"
        try:
            _require_small_regular_files(self.ca_file)
            context = client_context(self.ca_file)
            if self.cert_file is not None:
                option = "cert_file" if self.key_file is None else "cert_file and key_file"
                _require_small_regular_files(self.cert_file, self.key_file)
                load_client_certificate(context, self.cert_file, self.key_file)
        except ssl.SSLError as error:
            problem = error.reason or "it could not be read"
            raise ValueError(
                f"{option}: expected PEM that fits together, got something else ({problem})"
            ) from None
        except OSError as error:
            problem = describe_os_error(error)
            raise ValueError(f"{option}: expected a readable file: {problem}") from None
        return context

    def reloading_context(self) -> FileBackedValue[ssl.SSLContext]:
        """Return a context that is made again when one of the files changes."""
        return FileBackedValue((self.ca_file, self.cert_file, self.key_file), self.make_context)


def _require_small_regular_files(*files: Path | None) -> None:
    for file in files:
        if file is not None:
            require_small_regular_file(file)
