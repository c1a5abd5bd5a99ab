"""The engine alone in one process: steps, prefill, attention, reuse, against transformers and the machine's bounds."""
