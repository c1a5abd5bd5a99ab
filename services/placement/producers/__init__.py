"""Requests of bare producers: offered to workers until one accepts, then watched to their end. Pure."""
