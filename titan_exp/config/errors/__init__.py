"""User errors and their explanations."""
