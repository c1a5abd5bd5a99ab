"""Placement on NATS: subscriptions, the desk that answers, and the executor of actions."""
