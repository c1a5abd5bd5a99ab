"""What is known of workers: their load, rates and bookings, and what a request would cost at each. Pure."""
