"""Records what has changed since the last document of scheduled events, for any source.

A source gives each document to the `relay.ingest.recorder.Recorder`: the poller of a relay
(`relay.imds.poller`) a document that it has read from the metadata service, the hub of a fleet
(`relay.fleet.hub.merger`) what its agents have seen. The recorder compares it with the events that
the state file knows, and records each change as a CloudEvent. No module here knows a source or a
sink.
"""
