"""The pure room: laws of the document, the delta and the CloudEvents."""
