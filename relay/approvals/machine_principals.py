"""The machines of a fleet as voters: their principals, patterns over these, their resources. Pure.

A relay that is the agent of a hub passes on what the programs on its VM decide. The hub knows such
a voter as ``vm:<scope>/<relay>``, where ``<relay>`` is the name of the agent as a word of a routing
key. RabbitMQ vouches for both. A machine speaks for itself alone.

Rules, groups and people name machines by patterns, because nobody knows in advance which VMs a
scale set will have. Patterns exist for machines only, and match machines only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from relay.approvals.principals import VM_PREFIX
from relay.events.names import add_underscore_prefixed_names, other_instance_names, relay_word

_PRINCIPAL = re.compile(rf"{VM_PREFIX}:(?P<scope>[a-z0-9-]{{1,80}})/(?P<relay>[a-z0-9_-]{{1,80}})")
"""One machine."""
_WILDCARDS = frozenset("*?")


def machine_principal(scope: str, relay: str) -> str:
    """Return the principal of a machine. ``relay`` is the relay word of its agent."""
    principal = f"{VM_PREFIX}:{scope}/{relay}"
    if _PRINCIPAL.fullmatch(principal) is None:
        raise ValueError(f"expected a scope and a relay word, got {scope!r} and {relay!r}")
    return principal


def is_machine(entry: str) -> bool:
    """Whether an entry of a rule, group or person names a machine, or is a pattern over them."""
    return entry.startswith(f"{VM_PREFIX}:")


def is_pattern(entry: str) -> bool:
    """Whether an entry can mean several machines."""
    return is_machine(entry) and not _WILDCARDS.isdisjoint(entry)


def scope_of_machine(principal: str) -> str | None:
    """Return the scope of a machine; None for anybody else, and for a pattern."""
    machine = _PRINCIPAL.fullmatch(principal)
    return machine["scope"] if machine is not None else None


def matches_principal(entry: str, principal: str) -> bool:
    """Whether an entry of a rule, group or person means this principal.

    Both parts of a pattern must match: a wildcard stands for no slash. Any other entry means the
    principal that is the same text.
    """
    if entry == principal:
        return True
    if not is_pattern(entry) or _PRINCIPAL.fullmatch(principal) is None:
        return False
    parts = zip(split_scope_and_relay(entry), split_scope_and_relay(principal), strict=True)
    return all(fnmatchcase(part, pattern) for pattern, part in parts)


def split_scope_and_relay(entry: str) -> tuple[str, str]:
    """Return the parts of an entry about machines: of the scope, and of the relay word."""
    scope, _, relay = entry.removeprefix(f"{VM_PREFIX}:").partition("/")
    return scope, relay


def can_mean_machine_in_scope(entry: str, scope: str) -> bool:
    """Whether an entry about machines can mean some of this scope."""
    return fnmatchcase(scope, split_scope_and_relay(entry)[0])


def can_mean_same_machine(one: str, other: str) -> bool:
    """Whether there can be a machine that both entries mean."""
    parts = zip(split_scope_and_relay(one), split_scope_and_relay(other), strict=True)
    return all(patterns_overlap(*pair) for pair in parts)


@lru_cache(maxsize=16384)
def patterns_overlap(one: str, other: str) -> bool:
    """Whether there can be a text that both patterns with ``*`` and ``?`` match."""
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return patterns_overlap(one[1:], other) or patterns_overlap(one, other[1:])
    if other[0] == "*":
        return patterns_overlap(other, one)
    return (one[0] == other[0] or "?" in (one[0], other[0])) and patterns_overlap(
        one[1:], other[1:]
    )


def most_votes(voters: Iterable[str], *, each_resource: bool) -> float:
    """Return how many votes these people and principals can give for one event.

    Without ``each_resource`` a vote is for the whole event, so only one machine can vote.
    """
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
    machine = _PRINCIPAL.fullmatch(principal)
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
