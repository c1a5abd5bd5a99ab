"""A vLLM server as this worker's engine: a sidecar speaks to it over HTTP and ZMQ, and imports nothing of it."""
