"""What is watched and replaced while `forward` is traced: decisions, random branches, clocks, constants, casts."""
