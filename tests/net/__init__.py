"""Tests of `relay.net`."""
