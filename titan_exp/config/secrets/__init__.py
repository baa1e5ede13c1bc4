"""Secrets of the environment: recorded as typed, and read only where the user's code is called."""
