"""AMQP 0-9-1 with RabbitMQ, for the RabbitMQ sink, for approvals, and for fleets.

`broker_url` reads the URL, `connection` connects for ever, and `failures` explains why it could
not. `topology` makes the exchanges and queues. `publisher` publishes events. `approval_consumer`
receives approvals. `diagnostics` is for ``imds-relay doctor``.
"""
