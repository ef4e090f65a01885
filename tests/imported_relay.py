"""Imports the relay, for the server of `forked_relay`."""

from __future__ import annotations

import gc
from importlib import import_module

from relay.cli import make_app

make_app()  # imports the modules of all verbs
import_module("relay.app")
gc.collect()
gc.freeze()
