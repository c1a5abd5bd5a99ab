"""Frames of running attempts: who reads them, what each has had, and how they ended."""
