"""The events that a stream writes: OpenAI's forms and our own. Pure."""
