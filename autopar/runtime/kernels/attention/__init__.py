"""Attention of a rank's block of queries: whole, tile by tile, and in rings over blocks of keys."""
