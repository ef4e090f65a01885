"""INGEST: turns what a source saw into recorded events, whatever the source is."""
