"""Mattermost: a bot keeps one message per event current in one channel.

People answer with links or, if configured, with buttons. `settings` is the platform's section of
the configuration. `sink` connects the other modules.
"""

from relay.chat.platforms.mattermost.settings import Settings
from relay.chat.platforms.mattermost.sink import connect, diagnose

__all__ = ["Settings", "connect", "diagnose"]
