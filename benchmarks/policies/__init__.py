"""What placement's policies come to on simulated workers: hits, waiting times, evenness."""
