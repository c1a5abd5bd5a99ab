"""Coding blocks of K and V to int8 and bfloat16, and back."""
