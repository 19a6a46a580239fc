"""What a rank says of itself while a run goes on, and the conclusion when one keeps the others waiting."""
