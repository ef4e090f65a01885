"""A fleet: relays on many VMs, and one hub that decides and tells for all of them.

The relay on a VM is an agent. It sees (it polls IMDS) and acts (it sends a StartRequest that the
hub orders). The hub merges what its agents report, delivers to the sinks and takes approvals.
RabbitMQ carries everything between them.

- `settings` is the section ``fleet`` of the configuration.
- `messages` defines what travels, `message_reader` reads it, and `routing` says under which routing
  keys it travels and from whom.
- `topology` lists the exchanges and queues, `rabbitmq_definitions` the users and their rights, and
  `diagnostics` checks them for ``imds-relay doctor``.
- `agent` and `hub` are the two ends.
"""
