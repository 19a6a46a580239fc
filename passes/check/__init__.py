"""The second derivation: every lowered line typed again."""
