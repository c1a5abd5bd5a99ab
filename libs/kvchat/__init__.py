"""What a model writes, read as a message: text, reasoning and tool calls, piece by piece. Pure."""
