"""Who may start an event: the rules, the votes, and the gate that sends the StartRequests.

This module defines what other packages provide: the configuration of approvals, and the port by
which StartRequests reach IMDS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field, model_validator

from relay.amqp.broker_url import BrokerSettings, Declare
from relay.approvals.limits import Limit
from relay.approvals.rules import (
    BoundedDuration,
    Member,
    PositiveDuration,
    Principal,
    Quorum,
    Rule,
    RuleConditions,
)
from relay.settings import (
    KeyPath,
    Section,
    WrongValue,
    check_keys_differ_without_case,
    check_unique,
    describe_choices,
)
from relay.store import Grant, JournalHead, Mode

_MODES_BY_STRICTNESS: tuple[Mode, ...] = ("on", "dry-run", "off")


class AmqpSettings(BrokerSettings):
    """Approvals that arrive over RabbitMQ."""

    declare: Declare = True
    """true: create the exchanges and queues; passive: check that they exist; false: do neither."""


class ApprovalsSettings(Section):
    """What may be approved, and by whom. Without a rule nothing is approved."""

    enabled: bool = True
    """Enable it on only one of several relays of a scope."""
    dry_run: bool = False
    """Take decisions, and say what would be granted, but grant and send nothing."""
    tell_first: BoundedDuration = 5.0
    """How long a StartRequest for an event that names this VM waits for delivery of its notices."""
    hold_expires: PositiveDuration = 86400.0
    """How long a hold is in force."""
    amqp: AmqpSettings | None = None
    """Also take approvals from RabbitMQ."""
    rules: tuple[Rule, ...] = ()
    """The first rule that matches decides."""
    limits: tuple[Limit, ...] = ()
    """How many machines may go at once. Azure proceeds at NotBefore regardless."""
    groups: Mapping[str, tuple[Member, ...]] = Field(default_factory=dict)
    """Names for several principals or people."""
    people: Mapping[str, tuple[Principal, ...]] = Field(default_factory=dict)
    """The principals of each person. A person has one vote, with however many principals."""

    def mode(self, switch: Mode, *, trusted: bool = True) -> Mode:
        """Return the stricter of configuration and switch; "off" if the store is not trusted."""
        configured: Mode = "on"
        if not self.enabled or not trusted:
            configured = "off"
        elif self.dry_run:
            configured = "dry-run"
        return max(configured, switch, key=_MODES_BY_STRICTNESS.index)

    @model_validator(mode="after")
    def _check_people_and_groups(self) -> ApprovalsSettings:
        check_keys_differ_without_case("people", self.people)
        check_keys_differ_without_case("groups", self.groups)
        owners: dict[str, str] = {}
        for person, principals in self.people.items():
            for index, principal in enumerate(principals):
                owner = owners.setdefault(principal, person)
                if owner != person:
                    raise WrongValue(
                        ("people", person, index),
                        "expected every principal for one person, "
                        f"{principal} belongs to {owner} and to {person}",
                        ("people", owner, self.people[owner].index(principal)),
                    )
        for group, members in self.groups.items():
            self._check_members_exist(members, ("groups", group))
        return self

    @model_validator(mode="after")
    def _check_rules_and_limits(self) -> ApprovalsSettings:
        check_unique("limits", self.limits)
        check_unique("rules", self.rules, with_case=True)
        catch_all: str | None = None
        for index, rule in enumerate(self.rules):
            if catch_all is not None:
                raise ValueError(
                    f"rules.{rule.name}: it can never decide, because rule {catch_all} before it "
                    f"matches every event; put {catch_all} last"
                )
            if isinstance(rule.approve, Quorum):
                self._check_members_exist(rule.approve.from_, ("rules", index, "approve", "from"))
            if rule.match == RuleConditions():
                catch_all = rule.name
        return self

    def _check_members_exist(self, members: Iterable[str], path: KeyPath) -> None:
        for index, member in enumerate(members):
            kind, _, name = member.partition(":")
            known = {"group": self.groups, "person": self.people}.get(kind)
            if known is not None and name not in known:
                section = "groups" if kind == "group" else "people"
                raise WrongValue(
                    (*path, index),
                    f"expected a {kind} of approvals.{section}, {member} is none; "
                    f"{describe_choices(name, known, prefix=f'{kind}:')}",
                )


@dataclass(frozen=True, slots=True)
class ClaimedGrant:
    """A grant for which a StartRequest may be sent now, because its claim is in the journal."""

    grant: Grant
    """The grant as it was before the claim."""
    event_id: str
    """The EventId in the case that Azure wrote."""
    agent: str | None
    """Who executes the StartRequest, as `StartRequestPort.choose_agent` named it."""
    journal_head: JournalHead

    @property
    def attempt_number(self) -> int:
        """The number of the StartRequest for this grant, from 1."""
        return self.grant.attempts + 1


class StartRequestPort(Protocol):
    """How StartRequests reach IMDS. Only `start_requests` may call it.

    For each StartRequest, `refresh_event`, `choose_agent` and `send_start_request` are called in
    this order. The calls for one scope never overlap. Those for different scopes do.
    """

    async def refresh_event(self, scope: str, grant: Grant, /) -> None:
        """Read the event now, and return once it is recorded. Raises SourceError, and logs it."""

    def choose_agent(self, scope: str, grant: Grant, /) -> str | None:
        """Return who will execute the StartRequest, the ``agent`` of its claim; None: no choice.

        Raises SourceUnavailable if there is nobody: nothing is claimed, and the grant waits.
        """

    async def send_start_request(self, scope: str, claim: ClaimedGrant, /) -> None:
        """Send the StartRequest; return if IMDS answers 200.

        Raises SourceRefused if it answers 400, StartRequestNotDelivered if the StartRequest
        certainly reached nobody, and SourceUnavailable for another answer or none. From then on the
        StartRequest must not be executed any more, because the next one can follow.
        """
