"""``api.oidc``: whose tokens are taken, and what their roles may do. What verifies them is `relay.api.auth.entra_tokens`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from relay.approvals.request import Right
from relay.errors import RelayError
from relay.net.egress import parse_receiver_url
from relay.settings import Section

GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""How Entra ID writes the ids of tenants and objects."""


class TokenRefused(RelayError):
    """A token that proves nothing. The text is for our log and holds nothing of the token."""


def _guid(text: str) -> str:
    if GUID.fullmatch(text.lower()) is None:
        raise ValueError("expected the tenant's id, 32 hexadecimal digits in five groups")
    return text.lower()


def _safe(text: str) -> str:
    parse_receiver_url(
        text, allow_http=urlsplit(text).hostname in ("127.0.0.1", "::1", "localhost")
    )
    return text


class OidcSettings(Section):
    """Bearer tokens of Entra ID. The principal is entra:<tenant>/<object>; what it may do follows from its roles."""

    issuer: str = Field(min_length=1)
    """Who issues the tokens, letter for letter as in iss."""
    audience: str = Field(min_length=1)
    """For whom they are issued, letter for letter as in aud: this relay's application."""
    tenant: Annotated[str, AfterValidator(_guid)]
    """The only tenant whose people are known (tid)."""
    keys_url: Annotated[str, AfterValidator(_safe)]
    """The only place that the issuer's keys are fetched from; https."""
    roles: Mapping[str, tuple[Right, ...]] = Field(min_length=1)
    """What each application role (roles) may do: read, approve, hold, operate."""

    @model_validator(mode="after")
    def _installed(self) -> OidcSettings:
        if find_spec("jwt") is None:  # it comes with imds-relay[entra]
            raise ValueError(
                "expected the package imds-relay[entra], which verifies tokens; it is not installed"
            )
        return self
