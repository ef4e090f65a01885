"""Sinks, each against a real far side."""
