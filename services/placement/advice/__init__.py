"""What placement advises: blocks to preload, the worker to drain, how many workers to run. Pure."""
