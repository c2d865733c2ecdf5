"""What is kept of a set: a `State` made of accumulators that merge, its bytes, the encoder it came from, its sum over ranks."""
