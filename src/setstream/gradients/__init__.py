"""Gradients in constant memory: `encode`, and a module for each gradient mode. Start reading at `encode.py`."""
