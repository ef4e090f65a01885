"""The HTTP API: what programs and people call.

`server` accepts connections, `calls` takes each call through its checks, `callers` says who makes
it, and `routes` holds a module for each resource. The roles of the relay (`relay.roles`) make a
`relay.api.state.Relay` of their parts, and attach it to the server while they run. A relay polls
Azure itself, alone or as an agent of a fleet. A hub takes the events from its agents.
"""
