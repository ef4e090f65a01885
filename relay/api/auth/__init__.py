"""Finds out who makes a call: a program or a person, as a `Caller` with rights.

`relay.api.server.pipeline` asks for each call. `authentication` takes the credentials: a bearer key
of a client, a token of Entra ID (which `entra_tokens` verifies), a client's TLS certificate, a
client's signature of a callback, or the user of a call over the local socket. `sessions` has those
who signed in on the relay's pages: `sign_in` sends a person to Entra ID and takes the answer,
`pending_sign_in` ties both to one browser, and `entra_endpoints` knows where Entra ID listens.

A key or token counts first, then the cookie of a session, then the certificate. A call whose
credentials are wrong is refused. Other credentials are not tried after that.
"""
