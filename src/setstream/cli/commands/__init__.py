"""The flags of every command."""
