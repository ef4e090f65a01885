"""Decides who may use the buttons and the slash command."""

from __future__ import annotations

from relay.approvals.request import Caller
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.identity import MemberDirectory, NotAuthorized
from relay.chat.platforms.slack.payloads import Actor


class Authorizer:
    """Checks an actor against Slack's directory and the principals that the rules name."""

    def __init__(self, context: ChatContext, members: MemberDirectory) -> None:
        self._context = context
        self._members = members

    async def require_member(self, actor: Actor) -> None:
        """Return if the actor is a full member of the workspace.

        Raises NotAuthorized, IdentityUnavailable.
        """
        async with self._members.within_lookup_timeout():
            await self._members.require_workspace(actor)
            await self._members.require_member(actor)

    async def require_caller(self, actor: Actor) -> Caller:
        """Return the caller that may submit decisions for the actor.

        Does not ask Slack about a person whom no rule names. Raises NotAuthorized,
        IdentityUnavailable.
        """
        async with self._members.within_lookup_timeout():
            await self._members.require_workspace(actor)
            caller = self._context.decisions.caller(actor.principal, "slack")
            if caller is None:
                raise NotAuthorized(f"no rule of this relay names you, {actor.principal}")
            await self._members.require_member(actor)
        return caller
