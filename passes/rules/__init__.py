"""Which strategies there are and what they mean: the book of rules, conversions between specs, hubs, replayed values."""
