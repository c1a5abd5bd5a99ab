"""What the worker's loop knows of an engine, whichever it is: `engine_port` first."""
