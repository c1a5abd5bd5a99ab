"""What runs inside a vLLM server for the kvfleet worker beside it, loaded by vLLM's own flags. It brings no torch."""
