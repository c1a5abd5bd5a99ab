"""Work that may wait: files and batches as OpenAI's, producers' queued requests, who leads a batch, who runs a line."""
