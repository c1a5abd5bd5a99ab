"""What the ingress tells of itself: metrics, traces and the audit log."""
