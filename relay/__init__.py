"""imds-relay polls Azure Scheduled Events, publishes changes and forwards approvals to Azure.

docs/architecture.md says how it is built, and docs/glossary.md what its words mean.
"""

__version__ = "0.1.0"
