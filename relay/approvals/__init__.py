"""WHO MAY START IT: the rules, what is asked of them, and the gate that alone can send a StartRequest.

This is the contract: the section of the YAML document, and the port through which the gate reaches IMDS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field, model_validator

from relay.amqp.settings import BrokerSection
from relay.amqp.topology import Declare
from relay.events.match import Match
from relay.settings import Duration, Section

_PRINCIPAL = re.compile(r"(client|local|slack|entra|mtls):\S+")


def _voter(text: str) -> str:
    if not text.startswith("group:") and _PRINCIPAL.fullmatch(text) is None:
        raise ValueError("expected group:<name>, client:<name>, local:<user>, slack:<team>/<user>, entra:<tenant>/<object> or mtls:<name>")
    return text


def _member(text: str) -> str:
    if _PRINCIPAL.fullmatch(text) is None:
        raise ValueError("expected client:<name>, local:<user>, slack:<team>/<user>, entra:<tenant>/<object> or mtls:<name>")
    return text


_LONGEST = 3650 * 86400.0


def _sensible(seconds: float) -> float:
    # Moments are counted with it, and those end with the year 9999.
    if seconds > _LONGEST:
        raise ValueError(f"expected at most 3650d, got {seconds / 86400:g}d")
    return seconds


def _some_time(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("expected more than 0s: it would be over as soon as it begins")
    return seconds


_Span = Annotated[Duration, AfterValidator(_sensible)]
_Lifetime = Annotated[_Span, AfterValidator(_some_time)]


class Votes(Section):
    """A quorum: how many principals of whom must approve."""

    votes: int = Field(ge=1)
    """How many of them."""
    from_: tuple[Annotated[str, AfterValidator(_voter)], ...] = Field(alias="from", min_length=1)
    """Who may vote: group:<name>, client:<name>, local:<user>."""
    expires: _Lifetime | None = None
    """How long a vote counts; until NotBefore where left out."""
    close_before: _Span = 0.0
    """How long before NotBefore voting closes."""


class Rule(Section):
    """Which events may be approved, and how. The first rule that matches decides."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    match: Match = Match()
    """Conditions; every resource of the event must match."""
    approve: Literal["automatic"] | Votes


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
    tell_first: _Span = 5.0
    """How long a StartRequest for an event that names this VM waits for the notices about it to get out."""
    hold_expires: _Lifetime = 86400.0
    """How long a hold holds."""
    amqp: AmqpSettings | None = None
    """Also take approvals from RabbitMQ."""
    rules: tuple[Rule, ...] = ()
    """First match decides."""
    groups: Mapping[str, tuple[Annotated[str, AfterValidator(_member)], ...]] = Field(default_factory=dict)
    """Names for several principals."""

    @model_validator(mode="after")
    def _rules_can_be_met(self) -> ApprovalsSettings:
        names = [rule.name for rule in self.rules]
        for rule in self.rules:
            if names.count(rule.name) > 1:
                raise ValueError(f"rules: expected names that differ, {rule.name} comes twice")
            if not isinstance(rule.approve, Votes):
                continue
            for one in rule.approve.from_:
                if one.startswith("group:") and one.removeprefix("group:") not in self.groups:
                    raise ValueError(f"rules.{rule.name}.approve.from: expected a group of approvals.groups, {one} is none")
            able = voters(rule.approve, self.groups)
            if len(able) < rule.approve.votes:
                raise ValueError(f"rules.{rule.name}.approve: {rule.approve.votes} votes can never come from {len(able)} principals")
        return self


def voters(approve: Votes, groups: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The principals who may vote under a rule, groups taken apart."""
    found: set[str] = set()
    for one in approve.from_:
        found.update(groups[one.removeprefix("group:")] if one.startswith("group:") else (one,))
    return frozenset(found)


class StartRequestPort(Protocol):
    """The way to IMDS. The gate is its only holder."""

    async def fresh(self) -> None:
        """Read the document with a call begun from now on, and have what it holds recorded; return once it is. Raises SourceError."""

    async def start(self, event_ids: Sequence[str]) -> None:
        """Send one StartRequest for these events; return on 200.

        Raises SourceRefused on 400, SourceUnavailable when the answer is another or is not known.
        """
