"""The fleet: ingress, placement, workers, vaults and the command line. Installed as `kvfleet`."""

__version__ = "0.1.0"
