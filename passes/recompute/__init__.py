"""Which values backward makes again instead of keeping them from forward."""
