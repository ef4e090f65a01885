"""AMQP 0-9-1 with RabbitMQ: connections, topology, and the queue of approvals.

The sink that publishes events is `relay.sinks.rabbitmq`. `relay.approvals.amqp_handler` decides
about the approvals that the consumer receives.
"""
