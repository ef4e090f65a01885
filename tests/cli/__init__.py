"""Tests of what a person types."""
