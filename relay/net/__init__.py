"""Network helpers that sinks, chats, the API and the checks of `doctor` share."""
