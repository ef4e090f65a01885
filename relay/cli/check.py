"""``check``: what a configuration means, and what its rules would decide."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.api import Client
from relay.api.diagnostics import static_findings
from relay.api.server.tls import ServerTlsContext
from relay.approvals.rules import Hours, Quorum, Rule
from relay.approvals.service import effective_mode
from relay.approvals.status import ApprovalStatus, rule_for
from relay.approvals.transitions import next_transitions
from relay.cli._output import (
    format_duration,
    format_local_time,
    join_names,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_status,
    print_table,
)
from relay.cli.events import AsJson
from relay.cli.run import ConfigFile
from relay.config import USER_EVENTS_WAIT, Config, Loaded, load
from relay.errors import ConfigError, DocumentError
from relay.events.build import event_data
from relay.events.match import Match
from relay.events.model import Document, Event
from relay.events.timestamps import format_rfc3339
from relay.imds.document import parse_document
from relay.outbox import Occurrence
from relay.sinks import SinkSettings

Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="DOCUMENT",
        show_default=False,
        help="A Scheduled Events document in JSON: says which rule decides about each of its events.",
    ),
]


def check(*, config: ConfigFile = None, against: Against = None, as_json: AsJson = False) -> None:
    """Check the configuration and say what it means. Nothing is started, and nobody is called."""
    loaded = load(config)
    if loaded.config.api.tls is not None:
        ServerTlsContext(
            loaded.config.api.tls
        )  # as run does: files that it refuses are refused here
    decided = (
        list(decisions(loaded.config, _document(against), datetime.now(UTC)))
        if against is not None
        else None
    )
    warnings = [
        *warnings_of(loaded.config),
        *(f"{one.subject}: {one.line}" for one in static_findings(loaded.config.api)),
    ]
    if as_json:
        said = {
            "file": loaded.file and str(loaded.file),
            "config": loaded.config.model_dump(mode="json", by_alias=True),
            "warnings": warnings,
        }
        print_json(said if decided is None else {**said, "events": decided})
        return
    _show(loaded)
    if decided is not None:
        rows = [
            (
                one["eventId"],
                one["eventType"],
                one["eventSource"],
                join_names(one["resources"], most=3),
                one["rule"],
                one["follows"],
            )
            for one in decided
        ]
        columns = ("event", "type", "source", "machines", "rule", "what follows")
        print_output("")
        print_table(columns, rows, empty="the document holds no events")
    for warning in warnings:
        print_status(f"warning: {warning}")


def decisions(config: Config, document: Document, now: datetime) -> Iterator[dict[str, Any]]:
    """What the rules would decide about each event of a document that nobody has voted on."""
    mode = effective_mode(config.approvals, "on", trusted=True)
    for event in document.events:
        occurrence = _seen(event, document.incarnation)
        rule = rule_for(config.approvals.rules, occurrence, config.scope, now)
        standing = ApprovalStatus(
            occurrence=occurrence,
            decisions=(),
            grants=(),
            rule=rule,
            groups=config.approvals.groups,
            mode=mode,
            now=now,
            people=config.approvals.people,
        )
        yield {
            **occurrence.data,
            "rule": rule.name if rule else None,
            "approved": bool(next_transitions(standing)),
            "follows": _follows(standing),
        }


def _document(file: Path) -> Document:
    try:
        return parse_document(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--against: expected a file that can be read, {file}: {error.strerror}"
        ) from error
    except DocumentError as error:
        raise ConfigError(f"--against: {file}: {error}") from error


def _seen(event: Event, incarnation: int | None) -> Occurrence:
    return Occurrence(
        id=0,
        key=event.key,
        number=1,
        data=event_data(event, incarnation),
        revision=event.revision,
        live=True,
        boot_id=None,
        first_seen="",
        last_changed="",
        outcome=None,
        last_event_id="",
    )


def _follows(standing: ApprovalStatus) -> str:
    if standing.occurrence.event.is_started:
        return "nothing, it has started"
    if not standing.is_open:
        return "nothing, NotBefore has passed"
    if standing.rule is None:
        return "nothing: no rule, no approval"
    how = _how(standing.rule)
    if standing.voting_closes_at is not None and standing.quorum is not None:
        how = f"{how}; voting {'closes' if standing.now < standing.voting_closes_at else 'closed'} {format_local_time(format_rfc3339(standing.voting_closes_at))}"
    if (
        standing.rule.match.time is not None
        and (turns := standing.rule.match.time.next_change(standing.now)) is not None
    ):
        how = f"{how}; the rule holds until {format_local_time(format_rfc3339(turns))}"
    return how if standing.mode == "on" else f"nothing: approvals are {standing.mode} (else {how})"


def warnings_of(config: Config) -> Iterator[str]:
    """What holds and is still worth a word."""
    if config.user_events_wait:
        yield USER_EVENTS_WAIT
    if config.scope == "auto" and any(
        rule.match.scope is not None for rule in config.approvals.rules
    ):
        yield "scope: auto is known on the VM alone; conditions on the scope are compared with the word auto here"


def _show(loaded: Loaded) -> None:
    config, approvals, api = loaded.config, loaded.config.approvals, loaded.config.api
    reached = f"{api.listen} {'with' if api.tls else 'without'} TLS" + (
        f", and {api.socket}" if api.socket else ""
    )
    mode = effective_mode(approvals, "on", trusted=True)
    print_output(
        print_fields(
            (
                ("configuration", loaded.file or "the defaults: there is no file"),
                ("scope", config.scope),
                ("relay", config.relay),
                ("source", f"{config.source.url} every {format_duration(config.source.interval)}"),
                (
                    "store",
                    f"{config.store.path}; deliveries kept {format_duration(config.store.retain)}, the journal {format_duration(config.store.audit_retain)}",
                ),
                (
                    "approvals",
                    f"{mode}, {pluralize(len(approvals.rules), 'rule')}; a hold holds {format_duration(approvals.hold_expires)}",
                ),
                ("API", reached),
                ("log", config.telemetry.log),
            )
        ),
    )
    rules = [
        (number, rule.name, _conditions_of(rule) or "every event", _how(rule))
        for number, rule in enumerate(approvals.rules, start=1)
    ]
    print_output("")
    print_table(
        ("sink", "kind", "to", "events", "only"),
        [_sink(sink) for sink in config.sinks],
        empty="no sinks: nobody is told",
    )
    print_output("")
    print_table(("rule", "name", "if", "then"), rules, empty="no rules: nothing is approved")
    print_output("")
    print_table(
        ("client", "may", "about", "comes with"),
        [_client(client) for client in api.clients],
        empty="no clients: the API answers nobody from elsewhere",
    )


def _sink(sink: SinkSettings) -> tuple[object, ...]:
    return (
        sink.name,
        sink.kind,
        _where(sink),
        join_names(sink.events),
        _conditions(sink.match),
    )


def _where(sink: SinkSettings) -> str:
    """Of the URL only where it leads: the rest may hold a token."""
    one, several = getattr(sink, "target", None), getattr(sink, "targets", None)
    urls = several() if several else (one(),) if one else ()
    return ", ".join(str(url.origin()) for url in urls)


def _conditions(match: Match) -> str:
    texts = {
        "type": match.event_type,
        "source": match.event_source,
        "machines": match.resources,
        "scope": match.scope,
    }
    given = [
        f"{name} {' or '.join(values)}" for name, values in texts.items() if values is not None
    ]
    if match.duration is not None:
        given.append(f"takes {match.duration.min:g} to {match.duration.max:g} s")
    return "; ".join(given)


def _conditions_of(rule: Rule) -> str:
    return "; ".join(
        part
        for part in (
            _conditions(rule.match),
            _hours(rule.match.time) if rule.match.time is not None else "",
        )
        if part
    )


def _hours(hours: Hours) -> str:
    return f"{hours.from_} to {hours.to} {hours.zone}" + (
        f" on {join_names(hours.days, most=7)}" if len(set(hours.days)) < 7 else ""
    )


def _how(rule: Rule) -> str:
    if not isinstance(rule.approve, Quorum):
        return "approved at once"
    votes = rule.approve
    expires = (
        f", each good for {format_duration(votes.expires)}" if votes.expires is not None else ""
    )
    closes = (
        f", until {format_duration(votes.close_before)} before NotBefore"
        if votes.close_before
        else ""
    )
    machines = " that speak for every machine together" if votes.each_resource else ""
    sent = (
        f"; sent within {format_duration(votes.execution_expires)} or void"
        if votes.execution_expires is not None
        else ""
    )
    return f"{pluralize(votes.votes, 'vote')} of {join_names(votes.from_)}{machines}{expires}{closes}{sent}"


def _client(client: Client) -> tuple[object, ...]:
    return (
        client.name,
        ", ".join(client.can),
        join_names(client.resources) or "every machine",
        ", ".join(client.credential_kinds),
    )
