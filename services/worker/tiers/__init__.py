"""KV blocks below the device: host memory, vaults and other workers; offloading and restoring."""
