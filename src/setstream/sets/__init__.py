"""How sets come in and are cut: layouts in memory, sources that serve sets in pieces, partitions, shares of ranks."""
