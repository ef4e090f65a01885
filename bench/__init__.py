"""Measures the relay beside raw limits in the same run: these machines are shared and noisy, so ratios count."""
