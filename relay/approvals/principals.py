"""The forms of principals that rules, groups and people may name.

Five forms are built in. Each chat platform declares its own form in its settings class, also a
platform that an installed package adds; `relay.config` registers those forms when it loads the
platforms. This module does not know who may vote: `relay.approvals.rules` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from relay.errors import ConfigError

ENTRA_ID_PATTERN = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""The ids of Entra ID in principals: in lower case, as its tokens have them."""
VM_PREFIX = "vm"
"""The prefix of the machines of a fleet: see `relay.approvals.machine_principals`."""
_RESERVED_PREFIXES = frozenset({"group", "person", "rule"})
_PREFIX = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, slots=True)
class PrincipalForm:
    """How the principals of one origin are written: ``<prefix>:<name>``.

    ``placeholder`` is what error messages show for the name, such as ``<team>/<user>``.
    ``pattern`` is a regular expression that the whole name must match.
    """

    prefix: str
    placeholder: str
    pattern: str = r"\S+"

    def matches(self, principal: str) -> bool:
        """Return whether a principal has this form."""
        prefix, colon, name = principal.partition(":")
        return (
            bool(colon) and prefix == self.prefix and re.fullmatch(self.pattern, name) is not None
        )

    @override
    def __str__(self) -> str:
        return f"{self.prefix}:{self.placeholder}"


_BUILT_IN_FORMS = (
    PrincipalForm("client", "<name>"),
    PrincipalForm("local", "<user>", r"[^\s*?]+"),
    PrincipalForm("entra", "<tenant>/<object>", f"{ENTRA_ID_PATTERN}/{ENTRA_ID_PATTERN}"),
    PrincipalForm("mtls", "<name>"),
    PrincipalForm(VM_PREFIX, "<scope>/<relay>", r"[a-z0-9*?-]{1,80}/[a-z0-9_*?-]{1,80}"),
)
_forms = {form.prefix: form for form in _BUILT_IN_FORMS}
_chat_prefixes: set[str] = set()


def declare_chat_principal_form(form: PrincipalForm) -> None:
    """Accept the principals of a chat platform in rules, groups and people.

    Raises ConfigError if the prefix is malformed, reserved, or declared with another form.
    """
    if _PREFIX.fullmatch(form.prefix) is None or form.prefix in _RESERVED_PREFIXES:
        raise ConfigError(
            "expected a principal prefix of lower-case letters, digits and dashes other than "
            f"{', '.join(sorted(_RESERVED_PREFIXES))}, got {form.prefix!r}"
        )
    if _forms.setdefault(form.prefix, form) != form:
        raise ConfigError(
            f"expected one form of principals with the prefix {form.prefix}:, "
            f"got {_forms[form.prefix]} and {form}"
        )
    _chat_prefixes.add(form.prefix)


def is_principal(text: str) -> bool:
    """Return whether a text has one of the built-in or declared forms."""
    form = _forms.get(text.partition(":")[0])
    return form is not None and form.matches(text)


def is_chat_principal(text: str) -> bool:
    """Return whether a text has a form that a chat platform declared."""
    return text.partition(":")[0] in _chat_prefixes and is_principal(text)


def expected_form(text: str, references: Iterable[str] = ()) -> str:
    """Return what an error says about a text that is no principal, and no reference to others.

    It is the form that belongs to the prefix. Without a known prefix it is every form:
    ``group:<name>, client:<name>, …``.
    """
    form = _forms.get(text.partition(":")[0])
    if form is not None:
        return f"{form}, where {form.placeholder} matches {form.pattern}"
    return ", ".join((*(f"{kind}:<name>" for kind in references), *map(str, _forms.values())))
