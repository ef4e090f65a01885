"""What everything that speaks AMQP shares.

`address` reads where the broker is, `connection` makes a connection and makes it again for ever, `frames` keeps hostile
messages from ending it, `topology` sees to what must exist on the broker, `trouble` says in a sentence what went wrong.
"""
