"""Encoders and models: phi and a pool, a head, streams, the verbs as pure functions, models in folders."""
