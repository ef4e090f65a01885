"""Mutation testing of the pure decision code: ``make mutants MODULE=relay/signature.py``.

A mutant is a module with one small change that makes it wrong, such as ``<`` for ``<=``. If no test
fails, the tests do not check what was changed. `mutants` makes them, and `runner` runs tests on
each. `equivalent.toml` lists the mutants that behave as the module does, each with a reason.
"""
