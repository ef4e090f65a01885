"""The whole configuration: the sections that the packages declare, and the rules between sections.

Each package checks its own section. `Config` checks what concerns several of them, such as a rule
that asks for more votes than the clients can give. The settings of sinks and chat platforms are a
union by ``kind`` of all that are installed.

A configuration that is valid can have warnings: something without an effect, such as a rule with a
condition that no event can meet. `start_warnings` is what the log says when a relay starts or
reloads. `config_warnings` adds what only ``check`` and ``doctor`` show.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from relay.api.settings import ApiSettings, Client
from relay.approvals import ApprovalsSettings
from relay.approvals.principals import ONE_MACHINE_VOTES, is_machine, most_votes
from relay.approvals.rules import Quorum, Rule, eligible_voters, person_of
from relay.chat import ChatSettings
from relay.config.kinds import load_kinds
from relay.config.voters import check_principals_exist, voters_of_quorum
from relay.events.match import EVENT_SOURCES, EVENT_TYPES, Match, matches_any_pattern
from relay.fleet.settings import AgentSettings, FleetSettings, HubSettings
from relay.imds import DISCOVER, SourceSettings
from relay.imds.document import (
    API_VERSIONS,
    NEWEST_API_VERSION,
    SOURCE_SINCE,
    find_impossible_conditions,
)
from relay.settings import (
    KeyPath,
    Section,
    WrongValue,
    check_unique,
    closest,
    text_pattern_validator,
)
from relay.signature import decode_secret
from relay.sinks import SinkSettings
from relay.store import StoreSettings
from relay.telemetry import TelemetrySettings

NO_RULE_FOR_USER_EVENTS = (
    "no rule of approvals.rules can match event_source: [User]. Polling makes Azure wait up to "
    "15 minutes for approval of each reboot that a user starts. "
    "Remedy: the rule that `imds-relay init` prints"
)
_SEPARATORS = re.compile(r"[\s:/@?&=]+")
"""What is between a secret and the rest of a value: ``Bearer <key>``,
``amqp://user:<key>@host``."""

if TYPE_CHECKING:
    AnySink = SinkSettings
else:
    _settings = [module.Settings for module in load_kinds().modules.values()]
    AnySink = Annotated[functools.reduce(operator.or_, _settings), Field(discriminator="kind")]


class Config(Section):
    scope: Annotated[
        str,
        text_pattern_validator(
            r"[a-z0-9-]{1,80}",
            "auto, or a name such as vmss-a: a to z, 0 to 9 and -, at most 80 characters",
        ),
    ] = "auto"
    """The group of VMs that reads this document; auto: from instance metadata, on a hub: hub."""
    relay: Annotated[
        str,
        text_pattern_validator(
            r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}",
            "auto, or a name such as vm-1: letters, digits, ., _ and -, at most 80 characters",
        ),
    ] = "auto"
    """The name of this relay. auto: the VM's name, on a hub: the host's name."""
    fleet: FleetSettings | None = None
    """The role of this relay in a fleet; null: none."""
    source: SourceSettings = SourceSettings()
    store: StoreSettings = StoreSettings()
    sinks: tuple[AnySink, ...] = ()
    """Any number of sinks, each with its own name."""
    approvals: ApprovalsSettings = ApprovalsSettings()
    api: ApiSettings = ApiSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _check_role(self) -> Config:
        """Refuse keys that belong elsewhere. Ignored, they would look as if they had an effect."""
        if isinstance(self.fleet, AgentSettings):
            for path in (
                *([("sinks",)] if self.sinks else ()),
                *_non_default_keys("approvals", self.approvals, ApprovalsSettings.model_fields),
                # People and programs elsewhere call the hub and not its agents.
                *_non_default_keys("api", self.api, ("clients", "oidc", "public_url")),
            ):
                raise WrongValue(
                    path,
                    "expected no value on an agent (fleet.role: agent); "
                    "this belongs in the hub's configuration",
                )
        if isinstance(self.fleet, HubSettings) and "source" in self.model_fields_set:
            raise WrongValue(
                ("source",),
                "expected no such key on a hub (fleet.role: hub); "
                "a hub has no IMDS: this belongs in the configuration of the agents",
            )
        return self

    @model_validator(mode="after")
    def _check_what_sections_need(self) -> Config:
        check_unique("sinks", self.sinks)
        for sink in self.sinks:
            needs_public_url = isinstance(sink, ChatSettings) and sink.needs_public_url
            if needs_public_url and self.api.public_url is None:
                raise WrongValue(
                    ("api", "public_url"),
                    f"expected the URL at which the platform of sink {sink.name} "
                    "reaches this relay, got none; its approve_in_chat needs it",
                )
        if self.approvals.amqp is not None and not any(map(_delivers_approval_answers, self.sinks)):
            raise WrongValue(
                ("approvals", "amqp"),
                "expected a rabbitmq sink whose events include approval.*, "
                "because that sink sends the answers",
            )
        for index, limit in enumerate(self.approvals.limits):
            path = "approvals", "limits", index
            # A hub knows all machines; other relays know those of current events only.
            if limit.is_share and not isinstance(self.fleet, HubSettings):
                raise WrongValue(
                    (*path, "max"),
                    f"a share such as {limit.max} needs a hub, "
                    "which knows how many machines there are; here give a number of machines",
                )
            if limit.rest > self.store.audit_retain:
                raise WrongValue(
                    (*path, "rest"),
                    "expected no more than store.audit_retain: "
                    "a relay forgets an event that ended before that",
                )
        _refuse_shared_secrets(self.sinks, self.api.clients)
        return self

    @model_validator(mode="after")
    def _check_quorums(self) -> Config:
        check_principals_exist(self.approvals, self.api, self.fleet)
        for rule, quorum, voters in self.voting_rules:
            if most_votes(voters, each_resource=quorum.each_resource) < quorum.votes:
                has_machines = any(map(is_machine, voters)) and not quorum.each_resource
                raise WrongValue(
                    ("approvals", "rules", self.approvals.rules.index(rule), "approve"),
                    f"expected {quorum.votes} who may vote, "
                    f"there are only: {', '.join(voters) or 'none'}. "
                    "A client: or mtls: must be one of api.clients with approve in its can, also "
                    "where its person votes in chat; an entra: needs api.oidc"
                    + (f"; {ONE_MACHINE_VOTES}" if has_machines else ""),
                )
            self._refuse_double_voter(rule.name, quorum)
        return self

    def _refuse_double_voter(self, rule: str, quorum: Quorum) -> None:
        """Raise ValueError if a client could reach more than one vote with its principals."""
        people = self.approvals.people
        eligible = eligible_voters(quorum, self.approvals.groups, people)
        for client in self.api.clients:
            votes = {person_of(principal, people) for principal in client.principals}
            may_vote = all(principal in eligible for principal in client.principals)
            if quorum.votes > 1 and may_vote and len(votes) > 1:
                raise ValueError(
                    f"approvals.rules.{rule}.approve: {' and '.join(client.principals)} are one "
                    "client with two votes: list them as one person in approvals.people"
                )

    @property
    def voting_rules(self) -> list[tuple[Rule, Quorum, dict[str, list[str]]]]:
        approvals = self.approvals
        return [
            (rule, rule.approve, voters_of_quorum(rule.approve, approvals, self.api, self.sinks))
            for rule in approvals.rules
            if isinstance(rule.approve, Quorum)
        ]

    @property
    def has_no_rule_for_user_events(self) -> bool:
        """Whether no rule can match an event that a user starts.

        Azure then delays each such event: docs/protocol.md#polling-delays-reboots-by-users. An
        agent has no rules. Those of its hub are meant.
        """
        if isinstance(self.fleet, AgentSettings):
            return False
        sources = [rule.match.event_source for rule in self.approvals.rules]
        is_source_known = (
            isinstance(self.fleet, HubSettings) or self.source.api_version >= SOURCE_SINCE
        )
        return not any(
            source is None or (is_source_known and "user" in map(str.lower, source))
            for source in sources
        )

    @property
    def approval_answers_exchange(self) -> str:
        """The exchange of the sink that sends the answers to approvals over AMQP.

        The exchange and the queue of the approvals are named after it. Only valid if approvals.amqp
        is set: then there is such a sink.
        """
        return next(
            str(getattr(sink, "exchange", ""))
            for sink in self.sinks
            if _delivers_approval_answers(sink)
        )


def _non_default_keys(name: str, section: Section, keys: Iterable[str]) -> list[KeyPath]:
    default = type(section)()
    return [(name, key) for key in keys if getattr(section, key) != getattr(default, key)]


def _delivers_approval_answers(sink: SinkSettings) -> bool:
    """Whether it sends all from which whoever decides over AMQP gets an answer."""
    return sink.kind == "rabbitmq" and all(
        matches_any_pattern(sink.events, f"approval.{change}")
        for change in ("recorded", "granted", "refused", "voided")
    )


def _refuse_shared_secrets(sinks: Sequence[SinkSettings], clients: Sequence[Client]) -> None:
    """Raise WrongValue if a sink or another client has a client's key or signing secret.

    Each could decide in the name of the other: a signature covers the body, but not the name of the
    client that sends it. Values are never shown.
    """
    owners: dict[bytes, tuple[int, str]] = {}
    for index, client in enumerate(clients):
        for kind, credential in client.credentials():
            owner, _ = owners.setdefault(credential, (index, kind))
            if owner != index:
                raise WrongValue(
                    ("api", "clients", owner),
                    f"{clients[owner].name} and {client.name} have the same {kind}; "
                    "give each client its own",
                )
    for sink in sinks:
        for fingerprint in _secret_fingerprints_of_sink(sink):
            if fingerprint in owners:
                index, kind = owners[fingerprint]
                problem = (
                    f"client {clients[index].name} and sink {sink.name} have the same {kind}, so "
                    "whoever knows it for the sink could decide as the client; give each its own: "
                    "`imds-relay keys` makes one"
                )
                raise WrongValue(("api", "clients", index), problem)


def _secret_fingerprints_of_sink(sink: SinkSettings) -> Iterator[bytes]:
    """Yield everything that a credential of a client would equal if it were a secret of a sink."""
    for secret in sink.iter_current_secret_texts():
        for text in {secret, *secret.split(), *_SEPARATORS.split(secret)}:
            yield hashlib.sha256(text.encode()).digest()
            with suppress(ValueError):  # most are no signing secrets
                yield decode_secret(text)


# --- warnings about a valid configuration


def start_warnings(config: Config) -> Iterator[str]:
    if config.has_no_rule_for_user_events:
        yield NO_RULE_FOR_USER_EVENTS
    for place, match in _all_match_conditions(config):
        yield from _undocumented_value_warnings(place, match)
    if not isinstance(config.fleet, HubSettings):  # a hub has no source
        yield from _source_warnings(config)
    for _, problem in load_kinds().broken:
        yield f"{problem}; nothing uses it"


def config_warnings(config: Config) -> Iterator[str]:
    yield from start_warnings(config)
    if isinstance(config.fleet, HubSettings):
        yield from config.fleet.overlap_warnings()
    conditions = [rule.match for rule in config.approvals.rules]
    conditions += [limit.match for limit in config.approvals.limits]
    has_scope_condition = any(match.scope is not None for match in conditions)
    if config.scope == "auto" and has_scope_condition:
        yield (
            "scope: auto is resolved on the VM only; "
            "here conditions on the scope are compared with the word auto"
        )


def _all_match_conditions(config: Config) -> Iterator[tuple[str, Match]]:
    for rule in config.approvals.rules:
        yield f"rule {rule.name}", rule.match
    for limit in config.approvals.limits:
        yield f"limit {limit.name}", limit.match
    for sink in config.sinks:
        yield f"match of sink {sink.name}", sink.match


def _undocumented_value_warnings(place: str, match: Match) -> Iterator[str]:
    """Yield each type and source that Azure does not document. It may add some in future."""
    for key, values, known in (
        ("event_type", match.event_type, EVENT_TYPES),
        ("event_source", match.event_source, EVENT_SOURCES),
    ):
        lower_case = {name.lower() for name in known}
        for value in values or ():
            if value.lower() not in lower_case:
                close = closest(value, known)
                meant = f"Did you mean {close}? " if close else ""
                yield (
                    f"{place}: {key}: Azure sends {', '.join(known)}, and documents no "
                    f"{value}. {meant}Until it sends one, this condition matches nothing"
                )


def _source_warnings(config: Config) -> Iterator[str]:
    source = config.source
    if source.url == DISCOVER and "auto" in (config.scope, config.relay):
        yield (
            "source.url: discover is for VMs without a virtual network. They have no instance "
            "metadata, so the relay waits for it in vain. Remedy: give scope and relay a name"
        )
    if source.api_version not in API_VERSIONS:
        yield (
            f"source.api_version: {source.api_version} is none of the versions that Microsoft "
            f"lists: {', '.join(API_VERSIONS)}"
        )
    if isinstance(config.fleet, AgentSettings):
        return  # it has neither rules nor sinks of its own
    for place, match in _all_match_conditions(config):
        for reason in find_impossible_conditions(match, source.api_version):
            yield (
                f"{place} never matches with source.api_version {source.api_version}: {reason}. "
                f"Remedy: api_version: {NEWEST_API_VERSION}"
            )
