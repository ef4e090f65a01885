"""WHO MAY START IT: the rules, what is asked of them, and the gate that alone can send a StartRequest.

This is the contract: the section of the YAML document, and the port through which the gate reaches IMDS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import Field, model_validator

from relay.amqp.settings import BrokerSection
from relay.amqp.topology import Declare
from relay.approvals.rules import (
    Lifetime,
    Member,
    Principal,
    Quorum,
    Rule,
    RuleConditions,
    Span,
    eligible_voters,
    person_for,
)
from relay.settings import Section

__all__ = [
    "AmqpSettings",
    "ApprovalsSettings",
    "Quorum",
    "Rule",
    "StartRequestPort",
    "eligible_voters",
]


class AmqpSettings(BrokerSection):
    """Approvals taken from RabbitMQ."""

    declare: Declare = True
    """true: make the exchanges and queues of approvals; passive: see that they exist; false: take them as given."""


class ApprovalsSettings(Section):
    """What may be approved, and by whom. No rule, no approval."""

    enabled: bool = True
    """Of several relays of one scope, one alone should have it on."""
    dry_run: bool = False
    """Everything but the POST."""
    tell_first: Span = 5.0
    """How long a StartRequest for an event that names this VM waits for the notices about it to get out."""
    hold_expires: Lifetime = 86400.0
    """How long a hold holds."""
    amqp: AmqpSettings | None = None
    """Also take approvals from RabbitMQ."""
    rules: tuple[Rule, ...] = ()
    """First match decides."""
    groups: Mapping[str, tuple[Member, ...]] = Field(default_factory=dict)
    """Names for several principals or people."""
    people: Mapping[str, tuple[Principal, ...]] = Field(default_factory=dict)
    """The principals that one person has: of them all one vote counts."""

    @model_validator(mode="after")
    def _people_are_told_apart(self) -> ApprovalsSettings:
        owners: dict[str, str] = {}
        for name, principals in self.people.items():
            for one in principals:
                if owners.setdefault(one, name) != name:
                    raise ValueError(
                        f"people: expected every principal for one person, {one} is of {owners[one]} and of {name}"
                    )
        for name, members in self.groups.items():
            for one in members:
                if one.startswith("person:") and one.removeprefix("person:") not in self.people:
                    raise ValueError(
                        f"groups.{name}: expected a person of approvals.people, {one} is none"
                    )
        return self

    @model_validator(mode="after")
    def _rules_can_be_met(self) -> ApprovalsSettings:
        names = [rule.name for rule in self.rules]
        for number, rule in enumerate(self.rules):
            if names.count(rule.name) > 1:
                raise ValueError(f"rules: expected names that differ, {rule.name} comes twice")
            if any(earlier.match == RuleConditions() for earlier in self.rules[:number]):
                raise ValueError(
                    f"rules.{rule.name}: it can never decide, since a rule before it matches every event; put that one last"
                )
            if isinstance(rule.approve, Quorum):
                self._can_be_met(rule.name, rule.approve)
        return self

    def _can_be_met(self, name: str, approve: Quorum) -> None:
        for one in approve.from_:
            kind, _, named = one.partition(":")
            if kind == "group" and named not in self.groups:
                raise ValueError(
                    f"rules.{name}.approve.from: expected a group of approvals.groups, {one} is none"
                )
            if kind == "person" and named not in self.people:
                raise ValueError(
                    f"rules.{name}.approve.from: expected a person of approvals.people, {one} is none"
                )
        able = {
            person_for(one, self.people)
            for one in eligible_voters(approve, self.groups, self.people)
        }
        if len(able) < approve.votes:
            once = ", of whom each person counts once" if self.people else ""
            raise ValueError(
                f"rules.{name}.approve: {approve.votes} votes can never come from {len(able)} principals{once}"
            )


class StartRequestPort(Protocol):
    """The way to IMDS. The gate is its only holder."""

    async def read_fresh(self) -> None:
        """Read the document with a call begun from now on, and have what it holds recorded; return once it is. Raises SourceError."""

    async def start(self, event_ids: Sequence[str]) -> None:
        """Send one StartRequest for these events; return on 200.

        Raises SourceRefused on 400, SourceUnavailable when the answer is another or is not known.
        """
