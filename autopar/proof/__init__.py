"""Evidence that a program is right: verification against eager, measured bytes, random plans."""
