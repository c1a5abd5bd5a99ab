"""The `kvfleet` command: starts services as processes and speaks to them; it imports none of them."""
