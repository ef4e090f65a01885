"""imds-relay: hears Azure's Scheduled Events, tells everyone who must know, and brings their answer back."""

__version__ = "0.1.0"
