"""Responses that outlive their requests: stored, in the background, one after the other."""
