"""The factor graph of a program on one mesh: what may be chosen, and what every choice costs and holds."""
