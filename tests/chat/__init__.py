"""Tests of each chat platform against a server that follows the public API documentation."""
