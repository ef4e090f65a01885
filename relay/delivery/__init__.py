"""Delivers recorded events: who gets them, in which order, and when a failed try is repeated."""
