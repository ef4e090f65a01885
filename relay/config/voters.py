"""Who the principals of ``approvals`` are, as far as the configuration knows.

`check_principals_exist` refuses a name that nobody can have. `voters_of_quorum` returns who can
vote by a rule: for the check that there are enough, and for the table of ``imds-relay check``. A
principal is a way to be known, such as ``client:ci`` or ``entra:…``; a person can have several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relay.api.settings import ApiSettings
from relay.approvals import ApprovalsSettings
from relay.approvals.principals import VM_PREFIX, is_chat_principal, is_machine
from relay.approvals.rules import Quorum, clients_of_same_person, eligible_voters, person_of
from relay.chat import AnswerableChatSettings
from relay.fleet.settings import AgentSettings, HubSettings, patterns_overlap
from relay.settings import KeyPath, WrongValue, describe_choices
from relay.sinks import SinkSettings


def check_principals_exist(
    approvals: ApprovalsSettings, api: ApiSettings, fleet: AgentSettings | HubSettings | None
) -> None:
    """Raise WrongValue for a client, certificate or machine that the configuration rules out."""
    known = [principal for client in api.clients for principal in client.principals]
    for path, principal in _named_principals(approvals):
        kind, _, name = principal.partition(":")
        if is_machine(principal):
            _check_machine_in_fleet_domains(path, principal, fleet)
        if kind not in ("client", "mtls") or principal in known:
            continue
        owner = "a client" if kind == "client" else "the san of a client"
        problem = f"expected {owner} of api.clients, {principal} is none"
        others = (other.partition(":") for other in known)
        names = [other for prefix, _, other in others if prefix == kind]
        raise WrongValue(path, f"{problem}; {describe_choices(name, names, prefix=f'{kind}:')}")


def _check_machine_in_fleet_domains(
    path: KeyPath, machine: str, fleet: AgentSettings | HubSettings | None
) -> None:
    """Raise WrongValue if no relay can speak for a machine, or for those that a pattern means."""
    if not isinstance(fleet, HubSettings):
        raise WrongValue(
            path,
            f"expected a principal other than {machine}: the machines of a fleet need a hub "
            "(fleet.role: hub), which hears of their agents",
        )
    scope, _, relay = machine.removeprefix(f"{VM_PREFIX}:").partition("/")
    if not any(
        patterns_overlap(scope, possible_scope) and patterns_overlap(relay, possible_relay)
        for domain in fleet.domains
        for possible_scope in domain.scopes
        for possible_relay in domain.relays
    ):
        raise WrongValue(
            path, f"expected machines of fleet.domains, no user there speaks for {machine}"
        )


def _named_principals(approvals: ApprovalsSettings) -> Iterator[tuple[KeyPath, str]]:
    sections: list[tuple[KeyPath, Sequence[str]]] = []
    sections += [(("people", name), members) for name, members in approvals.people.items()]
    sections += [(("groups", name), members) for name, members in approvals.groups.items()]
    for index, rule in enumerate(approvals.rules):
        if isinstance(rule.approve, Quorum):
            sections.append((("rules", index, "approve", "from"), rule.approve.from_))
    for path, names in sections:
        for index, name in enumerate(names):
            yield ("approvals", *path, index), name


def voters_of_quorum(
    quorum: Quorum, approvals: ApprovalsSettings, api: ApiSettings, sinks: Sequence[SinkSettings]
) -> dict[str, list[str]]:
    """Return who can cast one vote by a rule, in order, each with the principals to vote with.

    They are named ``person:<name>``, else by the principal; a pattern over machines stands for all
    of them. A client needs the right to approve. So do the clients of a person who votes in chat.
    Local users and people in chat count, although nobody knows here whether they exist.
    """
    may_approve = api.resources_by_client_principal
    # A sink that takes approvals is enough where several have people of one platform.
    chats = [
        (sink.principals.prefix, "approve" in sink.can)
        for sink in sinks
        if isinstance(sink, AnswerableChatSettings) and sink.principals is not None
    ]

    def can_vote(principal: str) -> bool:
        prefix = principal.partition(":")[0]
        if prefix in ("client", "mtls"):
            return principal in may_approve
        if prefix == "entra":
            return api.oidc is not None
        if not is_chat_principal(principal):
            return True
        clients = clients_of_same_person(principal, approvals.people)
        is_refused = (prefix, False) in chats and (prefix, True) not in chats
        return not is_refused and all(client in may_approve for client in clients)

    voters: dict[str, list[str]] = {}
    for principal in sorted(eligible_voters(quorum, approvals.groups, approvals.people)):
        if can_vote(principal):
            voters.setdefault(person_of(principal, approvals.people), []).append(principal)
    return dict(sorted(voters.items()))
