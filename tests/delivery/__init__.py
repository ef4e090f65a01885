"""Tests of how it goes out."""
