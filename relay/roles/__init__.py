"""What a relay can be: a module for each role puts the parts of that role together.

- `plain`: a relay without a fleet.
- `agent`: it reports to the hub of a fleet and carries out its orders.
- `hub`: it merges what agents report, tells, decides, and orders StartRequests.

`parts` holds what roles have in common. What follows from the configuration is the `inner_half`,
which a `reload` leaves and enters again. Nothing here decides about events or approvals.
"""
