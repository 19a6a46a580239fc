"""Pictures of a saved program: its graph as blocks, as dot, and drawn as SVG."""
