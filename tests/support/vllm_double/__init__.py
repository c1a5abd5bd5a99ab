"""A vLLM server for tests: the routes, events, connector and sampler of the real one around a toy model.

It is what notes of vLLM 0.32 say of the real one, byte for byte. The connector's side of the link and the sampler are
the real ones; only HTTP, scheduler, cache and model are written again here.
"""
