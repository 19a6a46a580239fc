"""What a lowered program costs, in seconds and bytes: as a whole, and call by call."""
