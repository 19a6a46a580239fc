"""Accounts of a lowered program: its seconds and bytes, as a whole and call by call."""
