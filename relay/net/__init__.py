"""Network helpers for everything above this package."""
