"""Mixtures of experts: rows sent to the experts that they chose, their layers, and the way back."""
