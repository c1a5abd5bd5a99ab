"""The engine: one step after the other on a thread of its own, and what each said."""
