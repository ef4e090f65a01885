"""Runs `make demo` and `make test` on bare machines of Debian releases: `make platforms`."""
