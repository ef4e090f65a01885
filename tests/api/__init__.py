"""The HTTP API: a real server on loopback, in front of a real store, gate and dispatcher."""
