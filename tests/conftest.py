"""Fixtures that every test may ask for: a real NATS server, in a container or as a process."""

pytest_plugins = ["kvproto.testing.fixtures"]
