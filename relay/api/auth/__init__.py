"""Who calls: bearer keys, tokens, certificates, signatures, and how many calls each may make."""
