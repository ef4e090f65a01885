"""AMQP 0-9-1 with RabbitMQ, for the RabbitMQ sink, for approvals, and for fleets.

`broker_url` reads the URL, `connection` connects for ever through `frame_streams`, and `failures`
explains why it could not. `topology` makes the exchanges and queues. `event_message` encodes events
and `publisher` publishes them. `delivery_buffer` is the receiving end of a queue.
`approval_consumer` receives approvals: `message_verification` checks who sent one. `diagnostics` is
for ``imds-relay doctor``.
"""
