"""Tests of what the relay reports to its operator."""
