"""The zigzag order of causal sequences: an equivalent program whose sequence is in order everywhere.

Contiguous blocks of it are then those with equal shares of causal attention (`autopar.runtime.kernels.attention.zigzag`),
and sharding, lowering, checking and memory know nothing of it. `dims` says where the sequence is; `commutes` which ops do
the same to chunks of it wherever they stand, by the contract that sharding relies on; `rewritten` puts reorders around the
others, of which `ordered` allows only what costs little.
"""
