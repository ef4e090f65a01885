"""A fleet: relays on many VMs, and one hub that decides and tells for all of them.

The relay on a VM is an agent. It sees (it polls IMDS) and acts (it sends a StartRequest that the
hub orders). The hub merges what its agents report, delivers to the sinks and takes approvals.
RabbitMQ carries everything between them.
"""
