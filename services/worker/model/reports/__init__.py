"""What `kvfleet bench paper` asks of models without a fleet: each file is a process, JSON comes of it as one line."""
