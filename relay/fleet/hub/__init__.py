"""The hub of a fleet: it merges what the agents report, and decides and tells for all of them.

- `link` is the one connection to the broker, and `hub` takes the messages from it.
- `merge` has the rules by which the words of agents become one history of an event. `histories`
  keeps these in memory, `merger` applies the rules and records what is new, and `pulses` holds
  back what pulses say until reports had time to arrive.
- `roster` knows the agents, and `roster_keeper` stores it and forgets agents that are gone.
- `start_orders` orders StartRequests.
- `votes` decides what programs on the VMs decide about their own VM.
- `connection_health` reports whether the hub hears its agents, and `limit_machine_counts` how many
  of them a limit selects.
"""
