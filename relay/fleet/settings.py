"""The section ``fleet`` of the configuration: an agent, or the hub with its trust domains."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relay.amqp.broker_url import BrokerSettings, Declare, ExchangeName
from relay.events.match import matches_any_pattern
from relay.settings import Section, WrongValue, text_pattern_validator

UserName = Annotated[
    str,
    text_pattern_validator(
        r"[^\x00-\x1f\x7f-\x9f]{1,128}",
        "a user of the RabbitMQ such as vmss-a, without line breaks",
    ),
]
ScopePattern = Annotated[
    str,
    text_pattern_validator(
        r"[a-z0-9*?-]{1,80}",
        'a pattern such as "vmss-a-????????": a to z, 0 to 9, -, * and ?, at most 80 characters',
    ),
]
RelayPattern = Annotated[
    str,
    text_pattern_validator(
        r"[a-z0-9_*?-]{1,80}",
        'a pattern such as "vmss-a_*": a to z, 0 to 9, _, -, * and ?, at most 80 characters',
    ),
]


class TrustDomain(Section):
    """A RabbitMQ user of agents, and what it may speak for. Normally one for each scale set."""

    user: UserName
    """The RabbitMQ user of the agents."""
    scopes: tuple[ScopePattern, ...] = Field(min_length=1)
    """Patterns with * and ? over the scopes for which the user may speak.

    The scope of a scale set is its name with eight more characters: vmss-a-????????.
    """
    relays: tuple[RelayPattern, ...] = Field(default=("*",), min_length=1)
    """Patterns with * and ? over its relays, as words of a routing key: vmss-a_0, not VMSS-A_0."""

    def may_speak_for_relay(self, scope: str, relay_word: str) -> bool:
        return matches_any_pattern(self.scopes, scope) and matches_any_pattern(
            self.relays, relay_word
        )


def overlapping_scopes(one: TrustDomain, other: TrustDomain) -> tuple[str, str] | None:
    """Return a pattern of each domain over scopes if both users can speak for the same relay."""
    if not any(patterns_overlap(a, b) for a in one.relays for b in other.relays):
        return None
    return next(((a, b) for a in one.scopes for b in other.scopes if patterns_overlap(a, b)), None)


@lru_cache(maxsize=10_000)  # more than two patterns have pairs of ends
def patterns_overlap(one: str, other: str) -> bool:
    if not one or not other:
        return not (one + other).strip("*")
    if other[0] == "*":
        one, other = other, one
    if one[0] == "*":
        return patterns_overlap(one[1:], other) or patterns_overlap(one, other[1:])
    is_same = one[0] == other[0] or "?" in (one[0], other[0])
    return is_same and patterns_overlap(one[1:], other[1:])


class FleetBrokerSettings(BrokerSettings):
    """The RabbitMQ of a fleet."""

    exchange: ExchangeName = "azure.scheduledevents"
    """The exchanges and queues of the fleet are named after it: <exchange>.fleet and so on."""

    @property
    def url_user(self) -> str | None:
        """The user in the URL now; None if the URL names none."""
        return self.broker_urls()[0].user


class AgentSettings(FleetBrokerSettings):
    """A relay that reports to a hub and obeys it."""

    role: Literal["agent"]
    hub_user: UserName = "imds-hub"
    """The RabbitMQ user of the hub. The agent obeys nobody else."""

    @model_validator(mode="after")
    def _check_hub_user_differs(self) -> Self:
        if self.url_user == self.hub_user:
            raise ValueError(
                f"hub_user: expected the hub's user, which no agent has, got {self.hub_user}, "
                "which is also the user of this agent's URL"
            )
        return self


class HubSettings(FleetBrokerSettings):
    """The relay that decides and tells for all agents."""

    role: Literal["hub"]
    declare: Declare = True
    """true: make exchanges and queues; passive: check that they exist; false: do neither."""
    domains: tuple[TrustDomain, ...] = Field(min_length=1)
    """Whose reports count, and for which scopes."""

    @model_validator(mode="after")
    def _check_users(self) -> Self:
        users = [domain.user for domain in self.domains]
        for index, user in enumerate(users):
            if users.index(user) < index:
                raise WrongValue(
                    ("domains", index, "user"),
                    f"expected each user once, {user} comes twice: list all its scopes in one "
                    "domain",
                    ("domains", users.index(user), "user"),
                )
        if self.url_user in users:
            raise ValueError(
                f"domains: expected users other than the hub's own, got {self.url_user}: "
                "an agent with that user could give orders to all agents"
            )
        return self

    def overlap_warnings(self) -> Iterator[str]:
        """Yield a warning for each two users who can speak for the same relay."""
        for one, other in combinations(self.domains, 2):
            patterns = overlapping_scopes(one, other)
            if patterns is not None:
                yield (
                    f"fleet.domains: {one.user} and {other.user} can speak for the same relays, "
                    f"because the patterns {' and '.join(patterns)} match the same scopes. Each "
                    "can then report and vote in the place of the other. Remedy: for the scopes of "
                    "a scale set write its name and -????????"
                )


FleetSettings = Annotated[AgentSettings | HubSettings, Field(discriminator="role")]
