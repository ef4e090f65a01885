"""Describes a configuration in words, for ``check``. It shows no secret."""

from __future__ import annotations

from collections.abc import Iterator

from yarl import URL

from relay.amqp.broker_url import BrokerSettings, host_port
from relay.api import Client
from relay.api.auth.entra_settings import redirect_uri
from relay.approvals.engine import effective_approvals_mode
from relay.approvals.limits import Limit
from relay.approvals.rules import Hours, Quorum, Rule, RuleConditions
from relay.cli._output import format_duration, join_names, pluralize, print_lines
from relay.cli._tables import print_fields, print_table
from relay.config import Config, LoadedConfig
from relay.config.voters import Voter
from relay.events.match import Match
from relay.fleet.settings import AgentSettings, HubSettings
from relay.sinks import SinkSettings
from relay.sinks.webhook import Settings as WebhookSettings


def print_configuration(loaded: LoadedConfig) -> None:
    """Print what would run, and the tables of sinks, rules, people and clients."""
    config = loaded.config
    is_agent = isinstance(config.fleet, AgentSettings)
    print_fields(_overview_rows(loaded))
    print_lines("")
    print_table(
        ("sink", "kind", "to", "events", "only"),
        [_sink_row(sink) for sink in config.sinks],
        empty="no sinks: the hub tells" if is_agent else "no sinks: nobody is told",
    )
    print_lines("")
    print_table(
        ("rule", "name", "if", "then"),
        [
            (
                number,
                rule.name,
                _describe_match(rule.match) or "every event",
                describe_rule_approval(rule),
            )
            for number, rule in enumerate(config.approvals.rules, start=1)
        ],
        empty="no rules: the hub decides" if is_agent else "no rules: nothing is approved",
    )
    _print_limits(config)
    _print_voters(config)
    print_lines("")
    print_table(
        ("client", "may", "about", "comes with"),
        [_client_row(client) for client in config.api.clients],
        empty="no clients: the API refuses every caller from elsewhere",
    )
    if isinstance(config.fleet, HubSettings):
        print_lines("")
        print_table(
            ("RabbitMQ user of agents", "scopes", "relays"),
            [
                (domain.user, join_names(domain.scopes), join_names(domain.relays))
                for domain in config.fleet.domains
            ],
            empty="",
        )


def _print_limits(config: Config) -> None:
    """Print the limits, if there are any."""
    rows = [
        (
            limit.name,
            _describe_match(limit.match) or "every machine",
            describe_max_machines(limit),
            format_duration(limit.rest) if limit.rest else "none",
        )
        for limit in config.approvals.limits
    ]
    if rows:
        print_lines("")
        print_table(("limit", "counts", "lets go", "rest"), rows, empty="")


def describe_max_machines(limit: Limit) -> str:
    """Return how many machines may go at once."""
    if isinstance(limit.max, int):
        return f"{pluralize(limit.max, 'machine')} at once"
    return f"{limit.max} of the known machines at once"


def _print_voters(config: Config) -> None:
    """Print people, groups and who can vote by each rule, if there are any."""
    people = [(name, ", ".join(members)) for name, members in config.approvals.people.items()]
    groups = [(name, ", ".join(members)) for name, members in config.approvals.groups.items()]
    voters = [
        (rule.name, quorum.votes, "; ".join(map(_describe_voter, able)))
        for rule, quorum, able in config.rules_with_quorum_and_voters
    ]
    for columns, rows in (
        (("person", "is"), people),
        (("group", "members"), groups),
        (("rule", "votes", "who can vote"), voters),
    ):
        if rows:
            print_lines("")
            print_table(columns, rows, empty="")


def _describe_voter(voter: Voter) -> str:
    if voter.principals == (voter.name,):
        return voter.name
    return f"{voter.name} ({', '.join(voter.principals)})"


def describe_rule_approval(rule: Rule) -> str:
    """Return how the events of a rule get approved."""
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


def _overview_rows(loaded: LoadedConfig) -> Iterator[tuple[str, object]]:
    config = loaded.config
    store, approvals, api = config.store, config.approvals, config.api
    yield "configuration", loaded.file or "the defaults: there is no file"
    yield "scope", config.scope
    yield "relay", config.relay
    if config.fleet is not None:
        broker = ", ".join(host_port(url) for url in config.fleet.broker_urls())
        role = "hub"
        if isinstance(config.fleet, AgentSettings):
            role = f"agent of the hub whose RabbitMQ user is {config.fleet.hub_user}"
        yield "fleet", f"{role}, over {broker}"
    if isinstance(config.fleet, HubSettings):
        yield "source", "what the agents of the fleet report"
    else:
        yield "source", f"{config.source.url} every {format_duration(config.source.interval)}"
    retain = f"deliveries kept {format_duration(store.retain)}"
    audit_retain = f"the journal {format_duration(store.audit_retain)}"
    yield "store", f"{store.path}; {retain}, {audit_retain}"
    mode = effective_approvals_mode(approvals, "on", trusted=True)
    rule_count = pluralize(len(approvals.rules), "rule")
    hold_duration = format_duration(approvals.hold_expires)
    yield "approvals", f"{mode}, {rule_count}; a hold lasts {hold_duration}"
    socket = f", and the local socket {api.socket}" if api.socket else ""
    if api.socket == "auto":
        socket = ", and a local socket (auto)"
    yield "API", f"{api.listen} {'with' if api.tls else 'without'} TLS{socket}"
    if api.oidc is not None and api.oidc.sign_in is not None and api.public_url is not None:
        yield "sign-in", f"with Entra ID, which sends people back to {redirect_uri(api.public_url)}"
    telemetry = config.telemetry
    yield "log", f"{telemetry.log}, from {telemetry.level} on"


def _sink_row(sink: SinkSettings) -> tuple[object, ...]:
    return (
        sink.name,
        sink.kind,
        _origins_of_sink_urls(sink),
        join_names(sink.events),
        _describe_match(sink.match),
    )


def _origins_of_sink_urls(sink: SinkSettings) -> str:
    """Return the origins of the sink's URLs. The rest of a URL may hold a secret."""
    urls: tuple[URL, ...] = ()  # a plug-in can have keys with the names of these methods
    if isinstance(sink, BrokerSettings):
        urls = sink.broker_urls()
    elif isinstance(sink, WebhookSettings):
        urls = (sink.receiver_url(),)
    return ", ".join(str(url.origin()) for url in urls)


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
        conditions.append(_describe_hours(match.time))
    return "; ".join(conditions)


def _describe_hours(hours: Hours) -> str:
    days = f" on {join_names(hours.days, limit=7)}" if len(set(hours.days)) < 7 else ""
    return f"{hours.from_} to {hours.to} {hours.zone}{days}"


def _client_row(client: Client) -> tuple[object, ...]:
    return (
        client.name,
        ", ".join(client.can),
        join_names(client.resources) or "every machine",
        ", ".join(client.credential_kinds),
    )
