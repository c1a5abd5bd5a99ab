"""A real NATS server for tests, as pytest fixtures: `pytest_plugins = ["kvproto.testing.fixtures"]`.

fixtures         the names that tests ask for
backend          container or process: which one, and why
nats_container   adapter: the server in a container
fleet_containers adapter: a whole fleet in containers
docker_daemon    adapter: the daemon, and what must not be left on it
nats_process     the server as a child process, which tests may kill, stop and restart; where its executable is
nats_server      what both have in common
slow_proxy       a bad network: slow, stalled, cut, flipping bits
"""
