"""Facts about an optimizer: its state, its scratch, which parameters it updates as whole tensors."""
