"""The op dialect: every op's sharding rule, cost, local implementation and, where autopar has its own, its backward."""
