"""Routes that show the fleet: workers, placements, sessions, models and other regions."""
