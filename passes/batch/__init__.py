"""Microbatches: the batch sharded over an axis in time.

A microbatch is a shard of the batch like any other, but shards come one after another instead of side by side. A program
is captured once, for the whole batch. `dims` follows the batch through it; `states` says of every value whether
microbatches hold parts of it, terms of a sum, or all of it; `divided` is the program of one microbatch; `prologue` is what
must be known of the whole batch before the first forward; `microbatches` has the program by number of microbatches, and
`captured` makes it of a request.
"""
