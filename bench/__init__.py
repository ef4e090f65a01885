"""Measures the relay beside a bare outbox, in the same run on the same machine.

Sender and receiver are processes of their own. Shared machines are noisy, so the ratios count.
"""

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="  # noqa: S105  # signs what a measurement sends to itself
EXCHANGE = "imds-relay.bench"
