"""Makes the TLS contexts for all outgoing connections, and explains refused certificates.

The checks are the same on every version of Python:
docs/decisions/0022-same-certificate-checks-everywhere.md.
"""

from __future__ import annotations

import ssl
from functools import cache
from os import PathLike

HTTPS_CA_OPTION = "tls.ca_file of the webhook, or install it on this machine"
"""Where an operator names a CA for HTTPS. Chat sinks have no option for it."""

_File = str | PathLike[str]

# Error numbers of OpenSSL (x509_vfy.h). The ssl module has no names for them.
_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}
_NOT_YET_VALID = 9
_EXPIRED = 10
_NOT_A_CA = {24, 79}
_WRONG_PURPOSE = 26
_WRONG_NAME = {62, 64}
_WEAK_KEY_OR_HASH = {66, 67, 68}


def client_context(ca_file: _File | None = None) -> ssl.SSLContext:
    """Return a context that checks the server's certificate and name.

    ``ca_file`` replaces the CAs of this machine. Raises OSError, which includes ssl.SSLError.
    """
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
    """Return the context for HTTPS that trusts the CAs of this machine.

    It is made once, because reading the CAs takes long.
    """
    context = client_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def explain_refusal(error: Exception, ca_option: str) -> tuple[str, str]:
    """Return why the server's certificate was refused, and the remedy.

    ``ca_option`` says where the operator names a CA. Neither text contains the server's name.
    """
    problem: str = getattr(error, "verify_message", "") or "it was not accepted"
    code = getattr(error, "verify_code", None)
    if code in _WRONG_NAME:
        problem = "it is for another name"
        remedy = "correct the name in the url, or add that name to the certificate (subjectAltName)"
    elif code in _UNKNOWN_ISSUER:
        remedy = f"name the CA that signed it in {ca_option}"
    elif code == _EXPIRED:
        remedy = "renew it, or the CA that signed it"
    elif code == _NOT_YET_VALID:
        remedy = "check that the clocks of both machines are right"
    elif code in _NOT_A_CA:
        remedy = "make the CA again with basicConstraints CA:TRUE and keyUsage keyCertSign"
    elif code == _WRONG_PURPOSE:
        remedy = "make it again with extendedKeyUsage serverAuth"
    elif code in _WEAK_KEY_OR_HASH:
        remedy = "make it again with SHA-256 and an RSA key of 2048 bits or more, or an EC key"
    else:
        remedy = f"correct the certificate, or name the CA that signed it in {ca_option}"
    return problem, remedy
