"""Training: one trainer for every task."""
