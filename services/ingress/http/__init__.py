"""One HTTP exchange: reading a body, writing answers, errors and server-sent events; what an answer is."""
