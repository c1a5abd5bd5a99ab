"""`kvfleet up`: a whole fleet on one machine, its processes, its NATS server and its number of workers."""
