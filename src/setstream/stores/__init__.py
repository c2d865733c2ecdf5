"""States of many sets by id: `StateStore` on SQLite or PostgreSQL."""
