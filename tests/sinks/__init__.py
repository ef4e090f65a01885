"""Sinks, each against a real receiver."""
