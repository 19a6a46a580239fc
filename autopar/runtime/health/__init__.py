"""Signs of life of the ranks while a run goes on, and the conclusion when one keeps the others waiting."""
