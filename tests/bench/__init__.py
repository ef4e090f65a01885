"""Tests of the bench: its statistics, plots and page, and a small run of each metric."""
