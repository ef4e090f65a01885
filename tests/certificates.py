"""Certificates for tests. Each process makes new ones, so none is in the repository or expires.

They pass the strict checks of RFC 5280 that Python makes by default since 3.13
(``ssl.VERIFY_X509_STRICT``), unless a test asks for less. In a file with a key, the key is first.
"""

from __future__ import annotations

import atexit
import datetime as dt
import ipaddress
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AN_HOUR_AGO, _LATER = -dt.timedelta(hours=1), dt.timedelta(days=30)
_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
LOCALHOST: Final = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


class Authority:
    """A CA. ``ca=False`` makes a certificate that signs others though it is no CA.

    ``strict=False`` leaves out the key usage and both key identifiers, which many private CAs lack.
    """

    def __init__(
        self,
        name: str,
        *,
        strict: bool = True,
        ca: bool = True,
        sans: Sequence[x509.GeneralName] = (),
    ) -> None:
        self._strict = strict
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _begun(name, name, self._key).add_extension(
            x509.BasicConstraints(ca=ca, path_length=None), critical=True
        )
        if strict and ca:
            builder = builder.add_extension(_SIGNS, critical=True)
        self.certificate = self._signed(builder, self._key, sans)

    @property
    def pem(self) -> bytes:
        """Its certificate, for those who trust it."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def own(self) -> bytes:
        """Its key and its certificate, for a server that shows a self-signed certificate."""
        return _pem(self._key, self.certificate)

    def issue(
        self,
        name: str,
        sans: Sequence[x509.GeneralName] = (),
        *,
        usage: x509.ObjectIdentifier | None = None,
        begins: dt.timedelta = _AN_HOUR_AGO,
        ends: dt.timedelta = _LATER,
    ) -> bytes:
        """A new key and its certificate, PEM. ``begins`` and ``ends`` are counted from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _begun(name, self._name, key, begins, ends).add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return _pem(key, self._signed(builder, key, sans))

    @property
    def _name(self) -> str:
        return str(self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    def _signed(
        self,
        builder: x509.CertificateBuilder,
        key: ec.EllipticCurvePrivateKey,
        sans: Sequence[x509.GeneralName],
    ) -> x509.Certificate:
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
        if self._strict:
            by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            builder = builder.add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            builder = builder.add_extension(by, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _begun(
    name: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    begins: dt.timedelta = _AN_HOUR_AGO,
    ends: dt.timedelta = _LATER,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )


def _pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret + certificate.public_bytes(serialization.Encoding.PEM)


def _written(name: str, content: bytes) -> Path:
    file = FOLDER / f"{name}.pem"
    file.write_bytes(content)
    return file


FOLDER: Final = Path(tempfile.mkdtemp(prefix="imds-relay-tests-certificates-"))
"""Where the files below are until this process ends."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
_ours = Authority("authority of these tests")

AUTHORITY: Final = _written("authority", _ours.pem)
"""The CA of the server's and the client's certificates."""
SERVER: Final = _written(
    "server", _ours.issue("localhost", LOCALHOST, usage=ExtendedKeyUsageOID.SERVER_AUTH)
)
RENEWED: Final = _written(
    "renewed", _ours.issue("localhost", LOCALHOST, usage=ExtendedKeyUsageOID.SERVER_AUTH)
)
"""The server's next certificate."""
CLIENT: Final = _written("client", _ours.issue("drain", usage=ExtendedKeyUsageOID.CLIENT_AUTH))
"""Its common name is a RabbitMQ user with EXTERNAL."""
IMPOSTOR: Final = _written(
    "impostor",
    Authority("stranger of these tests").issue("drain", usage=ExtendedKeyUsageOID.CLIENT_AUTH),
)
"""The client's names, from a CA that nobody trusts."""
LOOPBACK: Final = _written("loopback", Authority("imds-relay tests", sans=LOCALHOST).own)
"""A self-signed certificate of a server, which is its own CA."""
