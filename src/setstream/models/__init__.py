"""Encoders (phi and a pool), models with a head, streams, pure functions for compilers, saved models."""
