"""The worker on NATS: requests in, frames out, and the way it goes."""
