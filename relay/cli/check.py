"""``check``: shows what a configuration means, and what its rules would decide about events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from relay.api.diagnostics import static_findings
from relay.api.server.sockets import make_server_context
from relay.approvals.engine import effective_approvals_mode
from relay.approvals.limits import Limit
from relay.approvals.status import ApprovalStatus, first_matching_rule
from relay.approvals.transitions import due_transitions
from relay.cli._configuration_summary import (
    describe_max_machines,
    describe_rule_approval,
    print_configuration,
)
from relay.cli._options import AsJson, ConfigFile
from relay.cli._output import (
    format_local_time,
    join_names,
    print_json,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_table
from relay.config import Config, load
from relay.config.warnings import config_warnings
from relay.errors import ConfigError, DocumentError
from relay.events.build import common_event_data
from relay.events.model import Document, ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.imds.document import parse_document
from relay.store import TrackedEvent

DocumentFile = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="DOCUMENT",
        help="A Scheduled Events document in JSON: shows which rule decides about each event.",
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
    warnings = [
        *config_warnings(loaded.config),
        *(
            f"{finding.subject}: {finding.line}"
            for finding in static_findings(loaded.config.api, loaded.config.store.path)
        ),
    ]
    if as_json:
        answer = {
            "file": loaded.file and str(loaded.file),
            "config": loaded.config.model_dump(mode="json", by_alias=True),
            "voters": [
                {"rule": rule.name, "votes": quorum.votes, "voters": [asdict(one) for one in able]}
                for rule, quorum, able in loaded.config.rules_with_quorum_and_voters
            ],
            "warnings": warnings,
        }
        print_json(answer if events is None else {**answer, "events": events})
        return
    print_configuration(loaded)
    if events is not None:
        _print_decisions(events)
    for warning in warnings:
        print_to_stderr(f"warning: {warning}")


def evaluate_rules_for_document(
    config: Config, document: Document, now: datetime
) -> Iterator[dict[str, Any]]:
    """Yield what the rules would decide about each event of a document without any vote."""
    mode = effective_approvals_mode(config.approvals, "on", trusted=True)
    for event in document.events:
        occurrence = _occurrence_as_first_stored(event, document.incarnation, config.scope)
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
            "approved": bool(due_transitions(status)),
            "limits": [limit.name for limit in limits],
            "follows": _describe_event_approval(status, limits),
        }


def _read_document_file(file: Path, api_version: str) -> Document:
    try:
        return parse_document(file.read_bytes(), api_version)
    except OSError as error:
        raise ConfigError(
            f"--against: expected a file that can be read, {file}: {error.strerror}"
        ) from error
    except DocumentError as error:
        raise ConfigError(f"--against: {file}: {error}") from error


def _occurrence_as_first_stored(
    event: ScheduledEvent, incarnation: int | None, scope: str
) -> TrackedEvent:
    """Return the event as the store would hold it when first seen."""
    return TrackedEvent(
        id=0,
        scope=scope,
        key=event.lowercase_event_id,
        number=1,
        position=1,
        data=common_event_data(event, incarnation),
        revision=event.revision,
        live=True,
        boot_id=None,
        first_seen="",
        last_changed="",
        outcome=None,
        last_event_id="",
    )


def _describe_event_approval(status: ApprovalStatus, limits: Sequence[Limit]) -> str:
    if status.occurrence.event.is_started:
        return "nothing, it has started"
    if not status.is_startable:
        return "nothing, NotBefore has passed"
    if status.rule is None:
        return "nothing: no rule, no approval"
    parts = [describe_rule_approval(status.rule)]
    closes_at = status.voting_closes_at
    if closes_at is not None and status.quorum is not None:
        verb = "closes" if status.now < closes_at else "closed"
        parts.append(f"voting {verb} {_format_datetime_in_local_time(closes_at)}")
    hours = status.rule.match.time
    ends_at = hours.next_change(status.now) if hours is not None else None
    if ends_at is not None:
        parts.append(f"the rule applies until {_format_datetime_in_local_time(ends_at)}")
    parts += [f"limit {limit.name}: {describe_max_machines(limit)}" for limit in limits]
    text = "; ".join(parts)
    return text if status.mode == "on" else f"nothing: approvals are {status.mode} (else {text})"


def _format_datetime_in_local_time(moment: datetime) -> str | None:
    return format_local_time(format_rfc3339(moment))


def _print_decisions(events: list[dict[str, Any]]) -> None:
    rows = [
        (
            event["eventId"],
            event["eventType"],
            event["eventSource"],
            join_names(event["resources"], limit=3),
            event["rule"],
            event["follows"],
        )
        for event in events
    ]
    columns = ("event", "type", "source", "machines", "rule", "what follows")
    print_lines("")
    print_table(columns, rows, empty="the document holds no events")
