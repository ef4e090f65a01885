"""HOW IT GOES OUT: which sinks want an event, when a failed delivery is tried again, and the workers that do it."""
