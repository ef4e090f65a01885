"""The section `api.oidc`: which people of Entra ID are accepted, how they come, and their rights.

They come with bearer tokens, or sign in on the relay's pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from relay.approvals.principals import ENTRA_ID_PATTERN
from relay.approvals.request import Right, Rights
from relay.net.egress import parse_receiver_url
from relay.settings import Section

CALLBACK_PATH = "/sign-in/callback"
GUID = re.compile(ENTRA_ID_PATTERN)
"""The form of the ids of tenants, applications and objects in Entra ID."""


def _check_guid(text: str, owner: str) -> str:
    if GUID.fullmatch(text.lower()) is None:
        raise ValueError(f"expected the {owner}'s id, 32 hexadecimal digits in five groups")
    return text.lower()


def check_https_or_loopback_url(text: str) -> str:
    """Return the URL. Raises ValueError for all but https, and http on this machine."""
    is_loopback = urlsplit(text).hostname in ("127.0.0.1", "::1", "localhost")
    parse_receiver_url(text, allow_http=is_loopback)
    return text


def redirect_uri(public_url: str) -> str:
    """Return where Entra ID sends people back who sign in. It must be registered there."""
    return f"{public_url.rstrip('/')}{CALLBACK_PATH}"


class SignInSettings(Section):
    """People sign in on the relay's pages, as an application with a client secret."""

    client_id: Annotated[str, AfterValidator(partial(_check_guid, owner="application"))] | None = (
        None
    )
    """The id of the application in which people sign in; null: audience is that id."""
    client_secret: SecretStr | None = None
    """The value of the application's client secret."""
    client_secret_file: Path | None = None

    @model_validator(mode="after")
    def _check_secret(self) -> SignInSettings:
        if not self.reveal("client_secret"):
            raise ValueError(
                "expected client_secret or client_secret_file, the value of the application's "
                "client secret, got neither"
            )
        self.run_field_checks({"client_secret": self._check_no_id})
        return self

    def _check_no_id(self) -> None:
        if GUID.fullmatch((self.reveal("client_secret") or "").lower()) is not None:
            raise ValueError(
                "expected the value of the client secret, got an id: "
                "Entra ID shows the value once, beside the secret's id"
            )


class OidcSettings(Section):
    """People of Entra ID: bearer tokens, and sign-in. The principal is entra:<tenant>/<object>."""

    issuer: str = Field(min_length=1)
    """The issuer of the tokens, exactly as in the claim iss."""
    audience: str = Field(min_length=1)
    """The recipient of the tokens, exactly as in the claim aud: this relay's application."""
    tenant: Annotated[str, AfterValidator(partial(_check_guid, owner="tenant"))]
    """The tenant whose members are accepted (the claim tid)."""
    applications: tuple[
        Annotated[str, AfterValidator(partial(_check_guid, owner="application"))], ...
    ] = ()
    """The ids of the applications whose access tokens are accepted (the claim azp or appid).
    Required without sign_in."""
    keys_url: Annotated[str, AfterValidator(check_https_or_loopback_url)]
    """The URL of the issuer's keys (JWKS): https, or http on this machine."""
    roles: Mapping[str, tuple[Right, ...]] = Field(min_length=1)
    """The rights of each application role (roles): read, approve, hold, operate."""
    sign_in: SignInSettings | None = None
    """Let people sign in on the page; null: they cannot."""

    def rights_of_roles(self, roles: object) -> Rights:
        """Return the rights of the roles in the claim `roles`."""
        names = [role for role in roles if isinstance(role, str)] if isinstance(roles, list) else []
        return Rights(frozenset(right for name in names for right in self.roles.get(name, ())))

    @property
    def client_id(self) -> str:
        """The id of the application in which people sign in. Only valid if sign_in is set."""
        configured = None if self.sign_in is None else self.sign_in.client_id
        return configured or self.audience.lower()

    @model_validator(mode="after")
    def _check_section(self) -> OidcSettings:
        if find_spec("jwt") is None:
            raise ValueError(
                "expected the package pyjwt, which verifies tokens, it is not installed: "
                "requirements/run.lock has it"
            )
        if self.sign_in is None and not self.applications:
            raise ValueError(
                "applications: expected at least 1 application whose access tokens are "
                "accepted, or sign_in"
            )
        if self.sign_in is not None and GUID.fullmatch(self.client_id) is None:
            raise ValueError(
                "sign_in: expected client_id, the id of the application in which people sign in, "
                "because audience is no such id"
            )
        try:
            if self.sign_in is not None:
                check_https_or_loopback_url(self.issuer)
        except ValueError as error:
            raise ValueError(f"issuer: with sign_in, {error}") from None
        return self
