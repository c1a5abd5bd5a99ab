"""What every service needs: settings, logs, metrics, health, NATS and data plane connections, the end of a process."""
