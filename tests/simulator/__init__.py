"""The simulated IMDS, called over loopback as users' software calls it."""
