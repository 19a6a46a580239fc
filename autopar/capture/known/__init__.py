"""Modules that are traced by another forward than their own, and the proof that it computes the same."""
