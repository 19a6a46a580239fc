"""Answers to "what if": a program solved again with something changed, and what that makes of its step, by cause."""
