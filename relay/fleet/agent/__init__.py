"""The agent: the relay on a VM of a fleet. It reports to the hub and carries out its orders.

- `link` is the one connection to the broker.
- `report_sink` publishes what the agent recorded, and `pulses` what it sees now.
- `start_orders` sends the StartRequests that the hub orders.
- `votes` passes decisions of local programs to the hub.
- `agent` puts them together.
"""
