"""Scheduled events, what changed between two documents, and the CloudEvents about it. Pure.

A document becomes events of `model`, which also finds the changes, and `build` makes a `cloudevent`
of each. `catalog` lists the types of CloudEvents, and `data_types` their fields. `match` decides
which events a rule, a sink or a client is about. `timestamps` reads and writes times.
"""
