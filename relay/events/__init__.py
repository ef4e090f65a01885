"""Pure facts: scheduled events, what changed between documents, and the CloudEvents about both."""
