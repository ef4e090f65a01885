"""Tests of what the relay remembers: every one on a file of its own."""
