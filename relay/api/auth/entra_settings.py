"""The section `api.oidc`: which bearer tokens of Entra ID are accepted, and their rights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from relay.approvals.principals import ENTRA_ID_PATTERN
from relay.approvals.request import Right
from relay.net.egress import parse_receiver_url
from relay.settings import Section

GUID = re.compile(ENTRA_ID_PATTERN)
"""The form of the ids of tenants, applications and objects in Entra ID."""


def _check_guid(text: str, owner: str) -> str:
    if GUID.fullmatch(text.lower()) is None:
        raise ValueError(f"expected the {owner}'s id, 32 hexadecimal digits in five groups")
    return text.lower()


def _check_url(text: str) -> str:
    is_loopback = urlsplit(text).hostname in ("127.0.0.1", "::1", "localhost")
    parse_receiver_url(text, allow_http=is_loopback)
    return text


class OidcSettings(Section):
    """Bearer tokens of Entra ID. The principal is entra:<tenant>/<object>."""

    issuer: str = Field(min_length=1)
    """The issuer of the tokens, exactly as in the claim iss."""
    audience: str = Field(min_length=1)
    """The recipient of the tokens, exactly as in the claim aud: this relay's application."""
    tenant: Annotated[str, AfterValidator(partial(_check_guid, owner="tenant"))]
    """The tenant whose members are accepted (the claim tid)."""
    applications: tuple[
        Annotated[str, AfterValidator(partial(_check_guid, owner="application"))], ...
    ] = Field(min_length=1)
    """The ids of the applications whose access tokens are accepted (the claim azp or appid)."""
    keys_url: Annotated[str, AfterValidator(_check_url)]
    """The URL of the issuer's keys (JWKS): https, or http on this machine."""
    roles: Mapping[str, tuple[Right, ...]] = Field(min_length=1)
    """The rights of each application role (roles): read, approve, hold, operate."""

    @model_validator(mode="after")
    def _check_package(self) -> OidcSettings:
        if find_spec("jwt") is None:
            raise ValueError(
                "expected the package pyjwt, which verifies tokens, it is not installed: "
                "requirements/run.lock has it"
            )
        return self
