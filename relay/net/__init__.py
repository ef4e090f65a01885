"""Outgoing connections of sinks, chat platforms and the broker.

`egress` refuses addresses that nobody may reach, and URLs that lead there. `http` makes requests.
`tls` makes TLS contexts, and has the section ``tls`` of the configuration. `backoff` says how long
to wait before another try. `connectivity` is for ``imds-relay doctor``. The client of the metadata
service has a session of its own (`relay.imds.calls`).
"""
