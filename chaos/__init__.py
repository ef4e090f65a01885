"""Proof that nothing is lost or approved by mistake, whatever fails.

``make chaos`` drives relays as processes against a simulated Azure, a real RabbitMQ and hostile
receivers, under load with approvals. `faults` has a module for each part of the world that fails.
`judge` counts what came of it. ``docs/proof.md`` shows the counts.
"""
