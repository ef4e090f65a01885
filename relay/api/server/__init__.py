"""The HTTP server: sockets, connections, TLS, and the order in which a call is checked."""
