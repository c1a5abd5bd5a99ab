"""Requests that run: their transcripts, the readers attached to them, and repeats of a request."""
