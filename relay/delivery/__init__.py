"""Delivers recorded events: who gets them, in which order, and when a failed try is repeated.

`dispatcher` says which sinks get an entry for an event. After the commit, it hands each entry to
the `worker` of its sink. The worker keeps it in `ordered_queue`, which reads its event
if that is not in memory, and lets the sink deliver it. `result_recording` checks what the sink
returned, and writes every result to the store. `sink_health` decides what follows from a failure,
with `retry`.
"""
