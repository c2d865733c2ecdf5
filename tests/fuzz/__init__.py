"""Hostile input, by the ten thousand: `make fuzz` reads it in child processes and over loopback, `make test` a little of it."""
