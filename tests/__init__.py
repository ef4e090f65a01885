"""Tests of imds-relay: the far side is always real."""
