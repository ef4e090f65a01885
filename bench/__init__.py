"""Measures the relay beside raw loops in the same run.

The machines are shared and noisy, so the ratios count.
"""
