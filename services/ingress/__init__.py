"""The ingress: HTTP in, requests to workers over NATS, server-sent events out."""
