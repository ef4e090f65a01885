"""Tests of `relay.approvals`."""
