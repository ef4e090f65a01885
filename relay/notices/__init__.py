"""WHAT PEOPLE ARE TOLD: how an event stands, in words that are the same in every chat and on the page behind their links.

`words`, `burst` and `history` are pure: how events stand comes in, a `card` or a line comes out. `board` reads and remembers
what the messages show, and brings answers to the gate.
"""
