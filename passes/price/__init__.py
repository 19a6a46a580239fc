"""Seconds of ops on their blocks and of messages along mesh axes."""
