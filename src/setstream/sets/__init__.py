"""Sets that need not be in memory: `SetSource` serves one set in pieces, `SourceChunks` several in chunks."""
