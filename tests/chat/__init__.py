"""Chat: every platform against a server of its API that was written from its public documentation."""
