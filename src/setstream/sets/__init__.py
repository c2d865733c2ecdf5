"""How sets are represented and cut: layouts in memory, sources that are read in pieces, partitions, shares of ranks."""
