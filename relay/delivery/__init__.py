"""Delivers recorded events: who gets them, in which order, and when a failed try is repeated.

`routing` says which sinks get an entry for an event. After the commit, `dispatcher` hands each
entry to the `worker` of its sink. The worker keeps it in `ordered_queue`, reads its event with
`read_ahead` if that is not in memory, and lets the sink deliver it with `sink_call`. `sink_health`
decides what follows from a failure, with `retry` and `circuit_breaker`. `result_recorder` writes
every result to the store.
"""
