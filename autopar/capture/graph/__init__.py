"""Passes over the captured graph: what computes nothing leaves, masks become flags, casts and guards are put in."""
