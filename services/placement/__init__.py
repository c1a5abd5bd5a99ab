"""Placement: picks the worker of each request, by what each would cost."""
