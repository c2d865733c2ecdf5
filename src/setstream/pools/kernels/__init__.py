"""The weighted sums of a chunk: of one block, of rows that are keys and values at once, of many blocks."""
