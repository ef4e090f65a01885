"""Makes every TLS context with which the relay connects to others, and says in plain words why a certificate was refused.

What is checked is the same on every version of Python: docs/decisions/0022-same-certificate-checks-everywhere.md.
"""

from __future__ import annotations

import ssl
from functools import cache
from os import PathLike

_File = str | PathLike[str]

# The numbers of OpenSSL (x509_vfy.h); the ssl module has no names for them.
_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}
_NOT_YET_VALID = 9
_EXPIRED = 10
_NO_CA = {24, 79}
_PURPOSE = 26
_OTHER_NAME = {62, 64}
_WEAK = {66, 67, 68}


def client_context(ca_file: _File | None = None) -> ssl.SSLContext:
    """Return a context that checks the far side's certificate and name; ``ca_file`` replaces the CAs of this machine.

    Raises OSError, which includes ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def load_certificate(
    context: ssl.SSLContext, cert_file: _File, key_file: _File | None = None
) -> None:
    """Show this certificate to the far side. Raises OSError, which includes ssl.SSLError."""
    context.load_cert_chain(
        cert_file, key_file, password=lambda: ""
    )  # else OpenSSL asks for it on the terminal


@cache
def default_context() -> ssl.SSLContext:
    """Return the context for HTTPS that trusts the CAs of this machine. It is made once: reading them takes a while."""
    context = client_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def explain_refusal(error: Exception, ca_option: str) -> tuple[str, str]:
    """Return why the far side's certificate was refused, and the remedy. Neither holds the name that was asked for.

    ``ca_option``: where the operator names a CA.
    """
    said: str = getattr(error, "verify_message", "") or "it was not accepted"
    code = getattr(error, "verify_code", None)
    if code in _OTHER_NAME:
        return (
            "it is for another name",
            "correct the name in the url, or add that name to the certificate (subjectAltName)",
        )
    if code in _UNKNOWN_ISSUER:
        return said, f"name the CA that signed it in {ca_option}"
    if code == _EXPIRED:
        return said, "renew it, or the CA that signed it"
    if code == _NOT_YET_VALID:
        return said, "see that the clocks of both machines are right"
    if code in _NO_CA:
        return said, "make the CA again with basicConstraints CA:TRUE and keyUsage keyCertSign"
    if code == _PURPOSE:
        return said, "make it again with extendedKeyUsage serverAuth"
    if code in _WEAK:
        return said, "make it again with SHA-256 and an RSA key of 2048 bits or more, or an EC key"
    return said, f"correct the certificate, or name the CA that signed it in {ca_option}"
