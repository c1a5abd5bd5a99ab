"""The wire of the fleet and its client: messages, codec, subjects, connections, buckets, members."""
