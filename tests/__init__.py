"""Tests of imds-relay: the other side is always real."""
