"""TLS of outgoing connections: their contexts, the section ``tls``, and refused certificates.

Every context of the relay as a client comes from here, so the checks are the same on every version
of Python: docs/decisions.md#certificates-are-checked-alike-on-every-version-of-python.
`default_context` trusts the CAs of this machine. `ClientTlsSettings` is the section ``tls`` of a
receiver, with CAs and a certificate of its own: its files are read when the configuration is
checked, so that an unusable file is found then, and again when they change. `explain_refusal` says
why the certificate of a server was refused.
"""

from __future__ import annotations

import ssl
from functools import cache
from os import PathLike
from pathlib import Path

from pydantic import model_validator

from relay.files import FileBackedValue, describe_os_error, require_small_regular_file
from relay.settings import Section

HTTPS_CA_OPTION = "tls.ca_file of the webhook, or install it on this machine"
"""Where an operator names a CA for HTTPS. Chat sinks have no option for it."""

_File = str | PathLike[str]

_WRONG_NAME = {62, 64}
_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}
_REMEDIES = {
    9: "check that the clocks of both machines are right",
    10: "renew it, or the CA that signed it",
    24: "make the CA again with basicConstraints CA:TRUE and keyUsage keyCertSign",
    26: "make it again with extendedKeyUsage serverAuth",
    66: "make it again with SHA-256 and an RSA key of 2048 bits or more, or an EC key",
}
_REMEDIES |= {79: _REMEDIES[24], 67: _REMEDIES[66], 68: _REMEDIES[66]}
"""By error number of OpenSSL (x509_vfy.h). The ssl module has no names for them."""


def client_context_trusting_ca_file(ca_file: _File | None = None) -> ssl.SSLContext:
    """Return a context that checks certificate and name; ``ca_file`` replaces the CAs. OSError."""
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def load_client_certificate(
    context: ssl.SSLContext, cert_file: _File, key_file: _File | None = None
) -> None:
    """Add the certificate that servers see. Raises OSError, which includes ssl.SSLError."""
    # Without a password OpenSSL would ask for one on the terminal.
    context.load_cert_chain(cert_file, key_file, password=lambda: "")


@cache
def default_context() -> ssl.SSLContext:
    """Return the context that trusts this machine's CAs, made once: to read them takes long."""
    context = client_context_trusting_ca_file()
    context.set_alpn_protocols(["http/1.1"])
    return context


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
        """Return one of the files as they are. Raises ValueError, which names the file alone."""
        option = "ca_file"
        try:
            if self.ca_file is not None:
                require_small_regular_file(self.ca_file)
            context = client_context_trusting_ca_file(self.ca_file)
            if self.cert_file is not None:
                option = "cert_file" if self.key_file is None else "cert_file and key_file"
                for file in filter(None, (self.cert_file, self.key_file)):
                    require_small_regular_file(file)
                load_client_certificate(context, self.cert_file, self.key_file)
        except ssl.SSLError as error:
            problem = error.reason or "it could not be read"
            if option == "cert_file":
                problem += "; without key_file, cert_file must hold its key as well"
            raise ValueError(
                f"{option}: expected PEM that fits together, got something else ({problem})"
            ) from None
        except OSError as error:
            problem = describe_os_error(error)
            raise ValueError(f"{option}: expected a readable file: {problem}") from None
        return context

    def reloading_context(self) -> FileBackedValue[ssl.SSLContext]:
        return FileBackedValue((self.ca_file, self.cert_file, self.key_file), self.make_context)


def explain_refusal(error: Exception, ca_option: str) -> tuple[str, str]:
    """Return why the server's certificate was refused, and the remedy.

    ``ca_option`` says where the operator names a CA. Neither text contains the server's name.
    """
    problem: str = getattr(error, "verify_message", "") or "it was not accepted"
    code: int = getattr(error, "verify_code", 0)
    if code in _WRONG_NAME:
        return "it is for another name", (
            "correct the name in the url, or add that name to the certificate (subjectAltName)"
        )
    if code in _UNKNOWN_ISSUER:
        return problem, f"name the CA that signed it in {ca_option}"
    general = f"correct the certificate, or name the CA that signed it in {ca_option}"
    return problem, _REMEDIES.get(code, general)
