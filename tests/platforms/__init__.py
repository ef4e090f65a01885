"""Runs `make demo` and `make test` on bare machines of several Debian releases: `make platforms`."""
