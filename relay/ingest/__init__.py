"""Turns the documents of any source into recorded events. It knows no source and no sink."""
