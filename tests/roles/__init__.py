"""Tests of the roles: how a relay is put together, and how it reloads."""
