"""What a request may say: each field is checked, and a refusal names it. Pure."""
