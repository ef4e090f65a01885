"""The principals that rules, groups and people may name: their forms, and the machines of a fleet.

Five forms are built in. Each chat platform declares its own form in its settings class, also a
platform that an installed package adds; `relay.config` registers those forms when it loads the
platforms. This module does not know who may vote: `relay.approvals.rules` does.

The agent of a hub passes on what the programs on its VM decide. The hub knows such a voter as
``vm:<scope>/<relay>``, where ``<relay>`` is the name of the agent as a word of a routing key.
RabbitMQ vouches for both. A machine speaks for itself alone. Patterns name machines that nobody
knows in advance. They exist for machines only, and match machines only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from typing_extensions import override

from relay.errors import ConfigError
from relay.events.model import add_underscore_prefixed_names, other_instance_names, relay_word

ENTRA_ID_PATTERN = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""The ids of Entra ID in principals: in lower case, as its tokens have them."""
VM_PREFIX = "vm"
"""The prefix of the machines of a fleet."""
_MACHINE = re.compile(rf"{VM_PREFIX}:(?P<scope>[a-z0-9-]{{1,80}})/(?P<relay>[a-z0-9_-]{{1,80}})")
_WILDCARDS = frozenset("*?")
ONE_MACHINE_VOTES = (
    "a machine (vm:) speaks for itself alone, so without each_resource all machines have one vote"
)
"""Part of the error about a rule that asks for too many votes."""
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


def declare_chat_principal_form(form: PrincipalForm) -> None:
    """Accept a platform's principals. Raises ConfigError for a malformed or reserved prefix."""
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


def is_principal(text: str) -> bool:
    prefix, colon, name = text.partition(":")
    form = _forms.get(prefix) if colon else None
    return form is not None and re.fullmatch(form.pattern, name) is not None


def is_chat_principal(text: str) -> bool:
    return is_principal(text) and _forms[text.partition(":")[0]] not in _BUILT_IN_FORMS


def expected_form(text: str, references: Iterable[str] = ()) -> str:
    """Return what to write in place of a text: the form that its prefix has, else every form."""
    form = _forms.get(text.partition(":")[0])
    if form is not None:
        return f"{form}, where {form.placeholder} matches {form.pattern}"
    return ", ".join((*(f"{kind}:<name>" for kind in references), *map(str, _forms.values())))


# --- machines


def machine_principal(scope: str, relay: str) -> str:
    principal = f"{VM_PREFIX}:{scope}/{relay}"
    if _MACHINE.fullmatch(principal) is None:
        raise ValueError(f"expected a scope and a relay word, got {scope!r} and {relay!r}")
    return principal


def is_machine(entry: str) -> bool:
    """Whether an entry names a machine, or is a pattern over them."""
    return entry.startswith(f"{VM_PREFIX}:")


def is_pattern(entry: str) -> bool:
    return is_machine(entry) and not _WILDCARDS.isdisjoint(entry)


def matches_principal(entry: str, principal: str) -> bool:
    """Whether an entry of a rule, group or person means this principal.

    Both parts of a pattern must match: a wildcard stands for no slash.
    """
    if entry == principal:
        return True
    if not is_pattern(entry) or _MACHINE.fullmatch(principal) is None:
        return False
    parts = zip(entry.split("/"), principal.split("/"), strict=True)
    return all(fnmatchcase(part, pattern) for pattern, part in parts)


def is_any_of(entries: Iterable[str], principal: str) -> bool:
    return any(matches_principal(entry, principal) for entry in entries)


def can_mean_machine_in_scope(entry: str, scope: str) -> bool:
    return fnmatchcase(f"{VM_PREFIX}:{scope}", entry.partition("/")[0])


def most_votes(voters: Iterable[str], *, each_resource: bool) -> float:
    """Return how many votes these can give: only one machine can vote for a whole event."""
    entries = set(voters)
    machines = {entry for entry in entries if is_machine(entry)}
    others = len(entries) - len(machines)
    if not each_resource:
        return others + min(len(machines), 1)
    return float("inf") if any(map(is_pattern, machines)) else len(entries)


@lru_cache(maxsize=4096)
def own_resources(principal: str, scope: str, resources: tuple[str, ...]) -> frozenset[str]:
    """Return the resources of an event for which a machine may decide: those that name it.

    There are none if the event is of another scope. ``Resources`` can have a machine in either
    notation of scale sets. Nothing that the machine itself says about its names has a say in this.
    """
    machine = _MACHINE.fullmatch(principal)
    if machine is None or machine["scope"] != scope:
        return frozenset()
    # The other notation counts only if the event does not have the name itself: in an availability
    # set, that can be the name of another machine.
    for names in ({machine["relay"]}, set(other_instance_names(machine["relay"]))):
        words = add_underscore_prefixed_names(frozenset(names))
        own = frozenset(resource for resource in resources if relay_word(resource) in words)
        if own:
            # Different names can give the same word. Then nobody knows which the machine is.
            return own if len({resource.lower() for resource in own}) == 1 else frozenset()
    return frozenset()
