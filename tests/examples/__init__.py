"""Tests of examples/, and what locks the packages that two of them need."""
