"""The `State` of a set: accumulators that merge, serialisation, the fingerprint of its encoder, sums over ranks."""
