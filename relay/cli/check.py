"""``check``: shows what a configuration means, and what its rules would decide about events.

It shows no secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from relay.amqp.broker_url import BrokerSettings
from relay.api.doctor import static_findings
from relay.api.sockets import make_server_context
from relay.approvals.limits import Limit
from relay.approvals.rules import Quorum
from relay.approvals.status import ApprovalStatus, first_matching_rule
from relay.cli._options import AsJson, ConfigFile, option
from relay.cli._output import (
    format_duration,
    pluralize,
    print_json,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_fields, print_table
from relay.config import Config, LoadedConfig, load
from relay.config.model import config_warnings
from relay.config.voters import Voter
from relay.errors import ConfigError, DocumentError
from relay.events.build import common_event_data
from relay.events.model import Document
from relay.fleet.settings import AgentSettings, HubSettings
from relay.imds.document import parse_document
from relay.sentences import join_names
from relay.settings import Section
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
        document = _read_document_file(against, loaded.config.source.api_version)
        events = list(evaluate_rules_for_document(loaded.config, document, datetime.now(UTC)))
    findings = static_findings(loaded.config.api, loaded.config.store.path)
    warnings = [
        *config_warnings(loaded.config),
        *(f"{finding.subject}: {finding.line}" for finding in findings),
    ]
    if as_json:
        answer = {
            "file": loaded.file and str(loaded.file),
            "config": loaded.config.model_dump(mode="json", by_alias=True),
            "voters": [
                {"rule": rule.name, "votes": quorum.votes, "voters": [asdict(one) for one in able]}
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


def _read_document_file(file: Path, api_version: str) -> Document:
    try:
        return parse_document(file.read_bytes(), api_version)
    except OSError as error:
        raise ConfigError(
            f"--against: expected a file that can be read, {file}: {error.strerror}"
        ) from error
    except DocumentError as error:
        raise ConfigError(f"--against: {file}: {error}") from error


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
            if limit.is_active(now) and limit.machines_of(occurrence.data, occurrence.scope)
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
    quorum = status.rule.approve
    text = "approved at once"
    if isinstance(quorum, Quorum):
        text = f"{pluralize(quorum.votes, 'vote')} of {join_names(quorum.from_)}"
    text = "; ".join([text, *(f"limit {limit.name}: {limit.max} at once" for limit in limits)])
    return text if status.mode == "on" else f"nothing: approvals are {status.mode} (else {text})"


def _overview(loaded: LoadedConfig) -> Iterator[tuple[str, object]]:
    yield "configuration", loaded.file or "the defaults: there is no file"
    is_hub = isinstance(loaded.config.fleet, HubSettings)
    for name, value in loaded.config:
        if name == "source" and is_hub:
            yield name, "what the agents of the fleet report"
        elif name != "sinks" and value is not None:
            fields = _fields(value) if isinstance(value, Section) else value
            if isinstance(fields, dict):  # lists and mappings have tables of their own
                fields = {key: part for key, part in fields.items() if key not in _TABLES}
            yield name, _in_one_line(fields)


_TABLES = frozenset({"rules", "limits", "people", "groups", "clients", "domains"})


def _tables(config: Config) -> Iterator[tuple[Sequence[str], Sequence[Sequence[object]], str]]:
    """Yield titles and rows of each table, and what is said if it has none; else it is left out."""
    is_agent = isinstance(config.fleet, AgentSettings)
    nobody = "no sinks: the hub tells" if is_agent else "no sinks: nobody is told"
    nothing = "no rules: the hub decides" if is_agent else "no rules: nothing is approved"
    approvals = config.approvals
    domains = config.fleet.domains if isinstance(config.fleet, HubSettings) else ()
    for what, sections, empty in (
        ("sink", config.sinks, nobody),
        ("rule", approvals.rules, nothing),
        ("limit", approvals.limits, ""),
        ("client", config.api.clients, "no clients: the API refuses every caller from elsewhere"),
        ("RabbitMQ user of agents", domains, ""),
    ):
        rows = []
        for section in sections:
            fields = _fields(section)
            name = fields.pop("user" if sections is domains else "name")
            rows.append((name, _in_one_line(fields)))
        yield (what, "settings"), rows, empty
    for what, named in (("person", approvals.people), ("group", approvals.groups)):
        yield (what, "members"), [(name, ", ".join(who)) for name, who in named.items()], ""
    voters = [
        (rule.name, quorum.votes, "; ".join(map(_describe_voter, able)))
        for rule, quorum, able in config.voting_rules
    ]
    yield ("rule", "votes", "who can vote"), voters, ""


def _describe_voter(voter: Voter) -> str:
    is_person = voter.principals != (voter.name,)
    return f"{voter.name} ({', '.join(voter.principals)})" if is_person else voter.name


def _fields(section: Section) -> dict[str, Any]:
    """Return what a section says, without what it leaves out. Of a secret URL, the origins."""
    fields = section.model_dump(mode="json", by_alias=True, exclude_none=True)
    match section:  # a plug-in can have keys with the names of these methods
        case BrokerSettings():
            fields["url"] = [str(url.origin()) for url in section.broker_urls()]
        case WebhookSettings():
            fields["url"] = str(section.receiver_url().origin())
    return {key: value for key, value in fields.items() if value not in ([], {})}


def _in_one_line(value: Any, *, nested: bool = False) -> str:
    """Return a value of the configuration as YAML in one line, with durations for people."""
    match value:
        case dict():
            text = ", ".join(f"{key}: {_in_one_line(it, nested=True)}" for key, it in value.items())
            return f"{{{text}}}" if nested else text
        case list():
            return f"[{', '.join(map(_in_one_line, value))}]"
        case bool():
            return str(value).lower()
        case float():  # the configuration has no other fractions
            return format_duration(value)
    return str(value)
