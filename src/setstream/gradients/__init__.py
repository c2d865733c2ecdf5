"""Any gradient in constant memory: `encode` and a module for each way back. Start reading at `encode.py`."""
