"""Verifies tokens (JWT) of Entra ID: access tokens of callers, and ID tokens of sign-ins.

Sources: https://learn.microsoft.com/entra/identity-platform/access-tokens (claims, validation),
access-token-claims-reference and id-token-claims-reference there, RFC 7519, RFC 8725 (known
attacks). Nothing in a token chooses the algorithm or the issuer.

An ID token of this relay's own application has the same issuer, audience, tenant and roles as an
access token. It tells an application who signed in, and gives nobody access. It names no
application that uses it: `_check_application`. It counts once, for the sign-in that asked for it:
it has that sign-in's nonce.
Imported only where `api.oidc` is configured: the extra `entra` has the library.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jwt

from relay.api.auth.authentication import NotAuthenticated
from relay.api.auth.entra_keys import SigningKeys
from relay.api.auth.entra_settings import GUID, OidcSettings
from relay.approvals.request import Caller
from relay.clock import Clock

if TYPE_CHECKING:
    from jwt.types import Options

CLOCK_TOLERANCE = 60.0
"""Seconds by which the clocks of issuer and relay may differ."""
_MAX_TOKEN_LENGTH = 16 * 1024
_ID_TOKEN_CLAIMS = ("nonce", "c_hash", "at_hash")
"""Claims that only ID tokens have."""
_MAX_NAME_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Person:
    """A person who signed in."""

    caller: Caller
    name: str | None
    """What the person is called, for people. It can change, and is not unique."""
    expires_at: float
    """When the ID token expires: seconds since 1970."""


class TokenVerifier:
    """Verifies tokens with the issuer's keys."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = SigningKeys(settings, clock)

    async def caller_from_token(self, token: str) -> Caller:
        """Return the token's owner with the rights of its roles. Raises NotAuthenticated."""
        claims = await self._verified_claims(token, self._settings.audience)
        self._check_application(claims)
        return self._caller_from_claims(claims)

    async def person_from_id_token(self, token: str, nonce: str) -> Person:
        """Return who signed in with this nonce. Raises NotAuthenticated.

        Who has no right of any role is refused: a session without rights helps nobody.
        """
        client_id = self._settings.client_id
        claims = await self._verified_claims(token, client_id)
        found = claims.get("nonce")
        if not isinstance(found, str) or not _are_equal(found, nonce):
            raise NotAuthenticated("the ID token's nonce: expected that of the sign-in")
        if claims.get("azp", client_id) != client_id:  # OpenID Connect Core, section 3.1.3.7
            raise NotAuthenticated("the ID token's azp: expected the relay's application")
        caller = self._caller_from_claims(claims)
        _check_roles_are_complete(claims)
        if not caller.rights.can:
            raise NotAuthenticated(
                f"{caller.principal} has none of the application roles of api.oidc.roles"
                + _groups_hint(claims)
            )
        return Person(caller, _clean_display_name(claims.get("name")), claims["exp"])

    async def _verified_claims(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the claims after the checks that all tokens need. Raises NotAuthenticated."""
        key = await self._keys.find(_key_id(token))
        claims = self._verify(token, key, audience)
        self._check_times(claims)
        return claims

    def _caller_from_claims(self, claims: Mapping[str, Any]) -> Caller:
        tenant, object_id = claims.get("tid"), claims.get("oid")
        if tenant != self._settings.tenant:
            raise NotAuthenticated("the token's tid: expected the configured tenant, got another")
        if not isinstance(object_id, str) or GUID.fullmatch(object_id) is None:
            raise NotAuthenticated("the token's oid: expected an object's id, got something else")
        rights = self._settings.rights_of(claims.get("roles"))
        return Caller(f"entra:{tenant}/{object_id}", "http", rights)

    def _verify(self, token: str, key: Any, audience: str) -> Mapping[str, Any]:
        options: Options = {
            "require": ["exp", "iat", "iss", "aud"],
            "strict_aud": True,
            # `_check_times` checks these with the relay's clock.
            "verify_exp": False,
            "verify_nbf": False,
            "verify_iat": False,
        }
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=["RS256"],
                audience=audience,
                issuer=self._settings.issuer,
                options=options,
            )
        except jwt.PyJWTError as error:
            raise NotAuthenticated(f"the token: {type(error).__name__}") from None
        return claims

    def _check_application(self, claims: Mapping[str, Any]) -> None:
        """Return for an access token that a configured application got.

        A token of the v2.0 endpoint names its application in azp, one of v1.0 in appid.
        """
        found = [name for name in _ID_TOKEN_CLAIMS if name in claims]
        if found:
            raise NotAuthenticated(f"expected an access token, got an ID token: it has {found[0]}")
        names = [claims[name] for name in ("azp", "appid") if name in claims]
        if not names:
            raise NotAuthenticated("expected an access token, got one without azp and appid")
        allowed = self._settings.applications
        if not all(isinstance(name, str) and name.lower() in allowed for name in names):
            raise NotAuthenticated(
                "the token's azp or appid: expected one of api.oidc.applications, got another"
            )

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
        if not all(_is_finite_number(value) for value in times.values()):
            raise NotAuthenticated("the token's times: expected numbers, got something else")
        now = self._clock.now().timestamp()
        if now >= times["exp"] + CLOCK_TOLERANCE:
            raise NotAuthenticated("the token has expired")
        valid_from = max(times["iat"], times.get("nbf", times["iat"]))
        if now < valid_from - CLOCK_TOLERANCE:
            raise NotAuthenticated("the token is not valid yet, by this machine's clock")


def _are_equal(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), expected.encode())


def _check_roles_are_complete(claims: Mapping[str, Any]) -> None:
    """Raise NotAuthenticated if the token only says where the roles are.

    Entra ID does so with claims that are too large, such as groups that it emits as roles.
    """
    elsewhere = claims.get("_claim_names")
    if isinstance(elsewhere, dict) and "roles" in elsewhere:
        raise NotAuthenticated("the ID token does not contain the roles: there are too many")


def _groups_hint(claims: Mapping[str, Any]) -> str:
    """Return what an administrator may have meant to count, and does not."""
    elsewhere = claims.get("_claim_names")
    has_overage = isinstance(elsewhere, dict) and "groups" in elsewhere
    if has_overage or any(name in claims for name in ("groups", "hasgroups")):
        return "; groups in the token give no rights, assign a role to the group"
    return ""


def _clean_display_name(name: object) -> str | None:
    """Return the name on one line, without characters that nobody sees."""
    if not isinstance(name, str):
        return None
    return "".join(filter(str.isprintable, name))[:_MAX_NAME_LENGTH].strip() or None


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON has integers that are too large for a float
        return False


def _key_id(token: str) -> str:
    """Return the id of the key that the token names. Raises NotAuthenticated for all but RS256."""
    if len(token) > _MAX_TOKEN_LENGTH:
        raise NotAuthenticated("the token is too long")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise NotAuthenticated("the bearer is neither a client's key nor a token") from None
    if header.get("alg") != "RS256" or not isinstance(header.get("kid"), str):
        raise NotAuthenticated(
            "the token's header: expected alg RS256 and a kid, got something else"
        )
    return str(header["kid"])
