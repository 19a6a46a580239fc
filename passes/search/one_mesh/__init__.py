"""Plans without stages: all ranks are one mesh and run the whole program."""
