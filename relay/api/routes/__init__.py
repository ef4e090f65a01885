"""The routes of the API: a module for each resource."""

from relay.api.calls import ROUTES
from relay.api.routes import approvals, deliveries, events, pages, relay, stream

__all__ = ["ROUTES", "approvals", "deliveries", "events", "pages", "relay", "stream"]
