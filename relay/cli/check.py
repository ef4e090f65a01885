"""``check``: shows what a configuration means, and what its rules would decide about events.

It shows no secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from relay.amqp.broker_url import BrokerSettings, host_port
from relay.api.doctor import static_findings
from relay.api.server import make_server_context
from relay.api.settings import redirect_uri
from relay.approvals.limits import Limit
from relay.approvals.rules import Quorum, Rule, RuleConditions
from relay.approvals.status import ApprovalStatus, first_matching_rule
from relay.cli._options import AsJson, ConfigFile, option, read_named_file
from relay.cli._output import format_duration, pluralize, print_json, print_lines, print_to_stderr
from relay.cli._tables import print_fields, print_table
from relay.config import Config, LoadedConfig, load
from relay.config.model import config_warnings
from relay.errors import ConfigError, DocumentError
from relay.events.build import common_event_data
from relay.events.match import Match
from relay.events.model import Document
from relay.fleet.settings import AgentSettings, HubSettings
from relay.imds.document import parse_document
from relay.settings import join_names
from relay.sinks import SinkSettings
from relay.sinks.webhook import Settings as WebhookSettings
from relay.store import TrackedEvent

DocumentFile = Annotated[
    Path | None,
    option(
        "--against",
        "DOCUMENT",
        "A Scheduled Events document in JSON: shows which rule decides about each event.",
    ),
]


def check(
    *, config: ConfigFile = None, against: DocumentFile = None, as_json: AsJson = False
) -> None:
    """Check the configuration and show what it means. Nothing is started or called."""
    loaded = load(config)
    if loaded.config.api.tls is not None:
        make_server_context(loaded.config.api.tls)  # raises for files that `run` would refuse
    events = None
    if against is not None:
        body = read_named_file("--against", against).encode()
        try:
            document = parse_document(body, loaded.config.source.api_version)
        except DocumentError as error:
            raise ConfigError(f"--against: {against}: {error}") from error
        events = list(evaluate_rules_for_document(loaded.config, document, datetime.now(UTC)))
    findings = static_findings(loaded.config.api, loaded.config.store.path)
    warnings = [
        *config_warnings(loaded.config),
        *(f"{finding.about}: {finding.line}" for finding in findings),
    ]
    if as_json:
        answer = {
            "file": loaded.file and str(loaded.file),
            "config": loaded.config.model_dump(mode="json", by_alias=True),
            "voters": [
                {
                    "rule": rule.name,
                    "votes": quorum.votes,
                    "voters": [{"name": name, "principals": own} for name, own in able.items()],
                }
                for rule, quorum, able in loaded.config.voting_rules
            ],
            "warnings": warnings,
        }
        print_json(answer if events is None else {**answer, "events": events})
        return
    print_fields(_overview(loaded))
    for columns, rows, empty in _tables(loaded.config):
        if rows or empty:
            print_lines("")
            print_table(columns, rows, empty=empty)
    if events is not None:
        titles = ("event", "type", "source", "machines", "rule", "what follows")
        keys = ("eventId", "eventType", "eventSource", "machines", "rule", "follows")
        named = [{**event, "machines": join_names(event["resources"], most=3)} for event in events]
        rows = [tuple(event[key] for key in keys) for event in named]
        print_lines("")
        print_table(titles, rows, empty="the document holds no events")
    for warning in warnings:
        print_to_stderr(f"warning: {warning}")


def evaluate_rules_for_document(
    config: Config, document: Document, now: datetime
) -> Iterator[dict[str, Any]]:
    mode = config.approvals.mode("on")
    for event in document.events:
        occurrence = TrackedEvent(  # as the store would hold it when first seen
            id=0,
            scope=config.scope,
            key=event.lowercase_event_id,
            number=1,
            position=1,
            data=common_event_data(event, document.incarnation),
            revision=event.revision,
            live=True,
            boot_id=None,
            first_seen="",
            last_changed="",
            outcome=None,
            last_event_id="",
        )
        rule = first_matching_rule(config.approvals.rules, occurrence, now)
        status = ApprovalStatus(
            occurrence=occurrence,
            decisions=(),
            grants=(),
            rule=rule,
            groups=config.approvals.groups,
            mode=mode,
            now=now,
            people=config.approvals.people,
        )
        limits = [
            limit
            for limit in config.approvals.limits
            if limit.match.in_hours(now) and limit.machines_of(occurrence.data, occurrence.scope)
        ]
        yield {
            **occurrence.data,
            "rule": rule.name if rule else None,
            "approved": status.is_grantable,
            "limits": [limit.name for limit in limits],
            "follows": _what_follows(status, limits),
        }


def _what_follows(status: ApprovalStatus, limits: Sequence[Limit]) -> str:
    if status.occurrence.event.is_started:
        return "nothing, it has started"
    if not status.is_startable:
        return "nothing, NotBefore has passed"
    if status.rule is None:
        return "nothing: no rule, no approval"
    named = [f"limit {limit.name}: {_describe_max(limit)}" for limit in limits]
    text = "; ".join([_describe_approval(status.rule), *named])
    return text if status.mode == "on" else f"nothing: approvals are {status.mode} (else {text})"


def _overview(loaded: LoadedConfig) -> Iterator[tuple[str, object]]:
    config = loaded.config
    store, approvals, api, fleet = config.store, config.approvals, config.api, config.fleet
    yield "configuration", loaded.file or "the defaults: there is no file"
    yield "scope", config.scope
    yield "relay", config.relay
    if fleet is not None:
        role = "hub"
        if isinstance(fleet, AgentSettings):
            role = f"agent of the hub whose RabbitMQ user is {fleet.hub_user}"
        yield "fleet", f"{role}, over {', '.join(map(host_port, fleet.broker_urls()))}"
    source = f"{config.source.url} every {format_duration(config.source.interval)}"
    is_hub = isinstance(fleet, HubSettings)
    yield "source", "what the agents of the fleet report" if is_hub else source
    retain, audit = format_duration(store.retain), format_duration(store.audit_retain)
    yield "store", f"{store.path}; deliveries kept {retain}, the journal {audit}"
    mode = approvals.mode("on")
    rules, lasts = pluralize(len(approvals.rules), "rule"), format_duration(approvals.hold_expires)
    yield "approvals", f"{mode}, {rules}; a hold lasts {lasts}"
    socket = f", and the local socket {api.socket}" if api.socket else ""
    if api.socket == "auto":
        socket = ", and a local socket (auto)"
    yield "API", f"{api.listen} {'with' if api.tls else 'without'} TLS{socket}"
    if api.oidc is not None and api.oidc.sign_in is not None and api.public_url is not None:
        yield "sign-in", f"with Entra ID, which sends people back to {redirect_uri(api.public_url)}"
    yield "log", f"{config.telemetry.log}, from {config.telemetry.level} on"


def _tables(config: Config) -> Iterator[tuple[Sequence[str], Sequence[Sequence[object]], str]]:
    """Yield titles and rows of each table, and what is said if it has none; else it is left out."""
    approvals = config.approvals
    is_agent = isinstance(config.fleet, AgentSettings)
    nobody = "no sinks: the hub tells" if is_agent else "no sinks: nobody is told"
    nothing = "no rules: the hub decides" if is_agent else "no rules: nothing is approved"
    sinks = [
        (sink.name, sink.kind, _origins(sink), join_names(sink.events), _describe_match(sink.match))
        for sink in config.sinks
    ]
    yield ("sink", "kind", "to", "events", "only"), sinks, nobody
    rules = [
        (at, rule.name, _describe_match(rule.match) or "every event", _describe_approval(rule))
        for at, rule in enumerate(approvals.rules, start=1)
    ]
    yield ("rule", "name", "if", "then"), rules, nothing
    limits = [
        (
            limit.name,
            _describe_match(limit.match) or "every machine",
            _describe_max(limit),
            format_duration(limit.rest) if limit.rest else "none",
        )
        for limit in approvals.limits
    ]
    yield ("limit", "counts", "lets go", "rest"), limits, ""
    yield ("person", "is"), [(name, ", ".join(who)) for name, who in approvals.people.items()], ""
    groups = [(name, ", ".join(members)) for name, members in approvals.groups.items()]
    yield ("group", "members"), groups, ""
    voters = [
        (
            rule.name,
            quorum.votes,
            "; ".join(
                name if own == [name] else f"{name} ({', '.join(own)})"
                for name, own in able.items()
            ),
        )
        for rule, quorum, able in config.voting_rules
    ]
    yield ("rule", "votes", "who can vote"), voters, ""
    clients = [
        (
            client.name,
            ", ".join(client.can),
            join_names(client.resources or ()) or "every machine",
            ", ".join(client.credential_kinds),
        )
        for client in config.api.clients
    ]
    empty = "no clients: the API refuses every caller from elsewhere"
    yield ("client", "may", "about", "comes with"), clients, empty
    domains = config.fleet.domains if isinstance(config.fleet, HubSettings) else ()
    users = [(each.user, join_names(each.scopes), join_names(each.relays)) for each in domains]
    yield ("RabbitMQ user of agents", "scopes", "relays"), users, ""


def _origins(sink: SinkSettings) -> str:
    """Return the origins of the sink's URLs. The rest of a URL may hold a secret."""
    match sink:  # a plug-in can have keys with the names of these methods
        case BrokerSettings():
            return ", ".join(str(url.origin()) for url in sink.broker_urls())
        case WebhookSettings():
            return str(sink.receiver_url().origin())
    return ""


def _describe_match(match: Match) -> str:
    patterns = {
        "type": match.event_type,
        "source": match.event_source,
        "machines": match.resources,
        "scope": match.scope,
    }
    conditions = [
        f"{name} {' or '.join(values)}" for name, values in patterns.items() if values is not None
    ]
    if match.duration is not None:
        conditions.append(f"takes {match.duration.min:g} to {match.duration.max:g} s")
    if isinstance(match, RuleConditions) and match.time is not None:
        hours = match.time
        days = f" on {join_names(hours.days, most=7)}" if len(set(hours.days)) < 7 else ""
        conditions.append(f"{hours.from_} to {hours.to} {hours.zone}{days}")
    return "; ".join(conditions)


def _describe_approval(rule: Rule) -> str:
    quorum = rule.approve
    if not isinstance(quorum, Quorum):
        return "approved at once"
    text = f"{pluralize(quorum.votes, 'vote')} of {join_names(quorum.from_)}"
    if quorum.each_resource:
        text += " that cover every machine together"
    if quorum.expires is not None:
        text += f", each good for {format_duration(quorum.expires)}"
    if quorum.close_before:
        text += f", until {format_duration(quorum.close_before)} before NotBefore"
    if quorum.remind is not None:
        text += f"; reminder {format_duration(quorum.remind)} before NotBefore"
    return text


def _describe_max(limit: Limit) -> str:
    if isinstance(limit.max, int):
        return f"{pluralize(limit.max, 'machine')} at once"
    return f"{limit.max} of the known machines at once"
