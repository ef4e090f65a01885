"""What a chat platform may use of the relay: `ChatContext`, the third argument of its ``connect``.

It gives the plans of messages and the status of events (`relay.chat.message_planner`), and the way
of a decision to the gate (`ChatDecisionSubmitter`). A platform proves who decided. It asks
`ChatDecisionSubmitter.caller` for the caller of that principal, and passes the caller to `decide`.
The gate then authorizes the decision like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain

from relay.approvals import ApprovalsSettings
from relay.approvals.engine import ApprovalEngine
from relay.approvals.principals import is_chat_principal
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionKind,
    DecisionRequest,
    Right,
    Rights,
)
from relay.approvals.rules import Quorum, clients_of_same_person
from relay.chat import AnswerableChatSettings
from relay.chat.message_planner import MessagePlanner
from relay.clock import Clock
from relay.events.data_types import NO_REMARKS
from relay.store.sqlite import Store

Submit = Callable[[DecisionRequest], Awaitable[DecisionAnswer]]


class ChatDecisionSubmitter:
    """Takes the decisions of chats, and passes them to ``submit`` of the gate.

    ``rights_by_client`` are the rights of each client, by its principal. A caller has what ``can``
    and ``resources`` of the sink allow. If ``approvals.people`` says that the person also has
    clients (``client:``, ``mtls:``), each of these limits the caller further.
    """

    def __init__(
        self,
        settings: ApprovalsSettings,
        clock: Clock,
        rights_by_client: Mapping[str, Rights],
        submit: Submit,
    ) -> None:
        self._clock = clock
        self._submit = submit
        self._people = settings.people
        self._rights_by_client = rights_by_client
        rules = [rule.approve for rule in settings.rules]
        voters = [approve.from_ for approve in rules if isinstance(approve, Quorum)]
        named = chain(*voters, *settings.groups.values(), *settings.people.values())
        self._principals = frozenset(filter(is_chat_principal, named))
        """Every chat principal that a rule, a group or a person names."""

    def caller(self, principal: str, sink: AnswerableChatSettings) -> Caller | None:
        """Return the caller for a principal that a chat vouches for.

        None if no rule, group or person of ``approvals`` names it, or if it is not of a form that
        a chat platform declared.

        It has the rights that the sink and every client of the person allow. If all clients have
        the same patterns, these are ``resources`` of the rights: others may cover the rest of the
        event where the rule says ``each_resource``. Every other list of patterns is a limit.
        """
        if principal not in self._principals:
            return None
        of_clients = [
            self._rights_by_client[client]
            for client in clients_of_same_person(principal, self._people)
        ]
        can = frozenset[Right](sink.can).intersection(*(rights.can for rights in of_clients))
        resources = {rights.resources for rights in of_clients if rights.resources is not None}
        limits = {sink.resources} if sink.resources is not None else set()
        rights = Rights(can, limits=tuple(resources | limits))
        if len(resources) == 1:
            rights = Rights(can, resources.pop(), tuple(limits))
        return Caller(principal, sink.kind, rights)

    async def decide(
        self,
        caller: Caller,
        *,
        event_id: str,
        decision: DecisionKind,
        revision: str,
        request_id: str,
        reason: str | None = None,
    ) -> DecisionAnswer:
        """Submit a decision to the gate. An accepted decision is on disk when this returns.

        ``event_id`` is a `TrackedEvent.reference`, and ``revision`` the state that the person saw.
        ``request_id`` identifies the click, so that a repeated call counts once.
        """
        content = "\n".join((event_id.lower(), decision, revision, reason or ""))
        request = DecisionRequest(
            caller=caller,
            event_id=event_id,
            decision=decision,
            revision=revision,
            at=self._clock.now(),
            remarks={**NO_REMARKS, "reason": reason},
            request_id=request_id,
            digest=hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest(),
        )
        return await self._submit(request)


class ChatContext:
    """What a chat platform may use of the relay. Sinks share it.

    ``messages`` plans what messages show, and reads statuses of events. ``public_url`` is where
    others reach this relay, without a slash at its end; None if that is not configured.
    """

    def __init__(
        self,
        store: Store,
        approvals: ApprovalEngine,
        clock: Clock,
        public_url: str | None,
        submit: Submit,
        rights_by_client: Mapping[str, Rights],
    ) -> None:
        self.public_url = public_url.rstrip("/") if public_url is not None else None
        self.messages = MessagePlanner(
            store=store, approvals=approvals, clock=clock, public_url=self.public_url
        )
        self.decisions = ChatDecisionSubmitter(approvals.settings, clock, rights_by_client, submit)
