"""Advice on a step: what limits it, how well it scales, and the changes that planning finds better."""
