"""imds-relay polls Azure Scheduled Events, publishes changes and forwards approvals to Azure."""

__version__ = "0.1.0"
