"""Tests of `relay.ingest`: from what a source saw to recorded events."""
