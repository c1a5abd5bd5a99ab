"""A real NATS server for tests, as pytest fixtures: `pytest_plugins = ["kvproto.testing.fixtures"]`.

`fixtures` has the names for tests, and chooses between `nats_container` and `nats_process`, which tests may kill, hang
and restart. `nats_cluster` starts three processes, `fleet_containers` a whole fleet.
"""
