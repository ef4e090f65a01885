"""The whole relay as a process, between a simulated Azure, real receivers and a real RabbitMQ."""
