"""Rows in PostgreSQL, for several servers that share them.

    BEGIN;  pg_advisory_xact_lock(key of each id, in rising order);  SELECT ...;  INSERT ... ON CONFLICT ...;  COMMIT

Advisory locks guard ids, whether their rows exist yet or not (a row lock needs a row). All writers take them in one order,
which excludes deadlocks; they end with the transaction, also when a server dies. Writers of different ids do not wait for
each other. How durable a commit is depends on PostgreSQL's `synchronous_commit`, which is on by default.
"""

import hashlib
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from setstream._utils.optional import need
from setstream.errors import StoreError
from setstream.stores.backend import Rows, Transaction

# Connections of one process: some threads that read, one or two that write.
CONNECTIONS = 8


def key_of(id: str) -> int:
    """The advisory lock of an id: 64 bits, signed. Two ids that share one wait for each other, and nothing else."""
    return int.from_bytes(hashlib.blake2b(f"setstream {id}".encode(), digest_size=8).digest(), "big", signed=True)


class PostgresRows(Rows):
    """Rows in tables of one database; `wait`: seconds to wait for a lock or a connection before giving up."""

    states, meta, tiles = "setstream_states", "setstream_meta", "setstream_tiles"
    keys, cursors = "setstream_keys", "setstream_cursors"
    # In the order of bytes, as in SQLite, for any language of the database.
    text, blob = 'TEXT COLLATE "C"', "BYTEA"

    def __init__(self, url: str, wait: float) -> None:
        self._lock = threading.RLock()
        self.url, self.wait = url, wait
        self._psycopg, self._pools = (need(name, "postgres", "PostgreSQL") for name in ("psycopg", "psycopg_pool"))
        self._pool: Any = None
        super().__init__(re.sub(r"//[^@/]*@", "//", url).split("?")[0], self._lock)  # without the password

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection in a transaction that ends with the block."""
        with self._lock:
            if self._pool is None:
                self._pool = self._pools.ConnectionPool(
                    self.url,
                    min_size=1,
                    max_size=CONNECTIONS,
                    timeout=self.wait,
                    open=True,
                    check=self._pools.ConnectionPool.check_connection,  # the database may have been restarted
                    kwargs={"options": f"-c lock_timeout={int(self.wait * 1000)}"},
                )
            pool = self._pool
        try:
            with pool.connection() as connection:
                yield connection
        except self._psycopg.errors.LockNotAvailable as error:
            raise StoreError(f"{self.place}: another server held these sets for more than {self.wait:.0f} s") from error
        except (self._psycopg.Error, self._pools.PoolTimeout) as error:
            raise StoreError(f"{self.place}: the database failed: {str(error).strip()}") from error

    def query(self, statement: str, *values: Any) -> list[Any]:
        with self._connection() as connection:
            return list(connection.execute(statement, values).fetchall())

    @contextmanager
    def transaction(self, ids: Collection[str]) -> Iterator[Transaction]:
        with self._connection() as connection, connection.cursor(binary=True) as cursor:
            keys = sorted({key_of(id) for id in ids} or {key_of("")})
            connection.execute("SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) AS key", [keys])
            yield Transaction(self, cursor)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            self._pool = None
