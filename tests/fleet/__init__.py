"""The messages of a fleet, its settings and its rights on a RabbitMQ."""
