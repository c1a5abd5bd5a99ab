"""Which blocks stay on the device, and those outside it: host, vault, data plane and codec, and what they bring."""
