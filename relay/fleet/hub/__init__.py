"""The hub of a fleet: it merges what the agents report, and decides and tells for all of them."""
