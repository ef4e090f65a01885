"""The metadata service as a source: calls, polls, and which VM this is."""
