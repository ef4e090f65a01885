"""The agent: the relay on a VM of a fleet. It reports to the hub and carries out its orders."""
