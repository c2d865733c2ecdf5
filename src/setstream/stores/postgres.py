"""Rows in PostgreSQL, for several servers that share them.

    BEGIN;  pg_advisory_xact_lock(key of each id, in rising order);  SELECT ...;  INSERT ... ON CONFLICT ...;  COMMIT

Advisory locks guard ids, whether their rows are there yet or not (a row lock cannot hold a row that is not there). All
take them in one order, so nobody waits in a circle; they end with the transaction, also when a server dies. Writers of
different ids do not wait for each other. How sure a commit is, is PostgreSQL's own setting: `synchronous_commit`, on
unless you say otherwise.
"""

import hashlib
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from setstream._utils.optional import need
from setstream.errors import StoreError
from setstream.stores.backend import Row, Rows, Work

# Connections of one process: some threads that read, one or two that write.
CONNECTIONS = 8


def key_of(id: str) -> int:
    """The advisory lock of an id: 64 bits, signed. Two ids that share one wait for each other, and nothing else."""
    return int.from_bytes(hashlib.blake2b(f"setstream {id}".encode(), digest_size=8).digest(), "big", signed=True)


class PostgresRows(Rows):
    """Two tables of one database. wait: seconds to wait for a lock or a connection before giving up."""

    shared = True
    states, meta = "setstream_states", "setstream_meta"
    # In the order of bytes, as SQLite has it, whatever the database's language.
    schema = (
        Rows.schema[0],
        'CREATE TABLE IF NOT EXISTS {states} (id TEXT COLLATE "C" PRIMARY KEY, count BIGINT NOT NULL, state BYTEA NOT NULL)',
    )

    def __init__(self, url: str, wait: float) -> None:
        super().__init__(re.sub(r"//[^@/]*@", "//", url).split("?")[0])  # without the password
        self.url, self.wait = url, wait
        self._psycopg, self._pools = (need(name, "postgres", "PostgreSQL") for name in ("psycopg", "psycopg_pool"))
        self._lock = threading.RLock()
        self._pool: Any = None

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
            raise StoreError(f"{self.place}: the database cannot do it: {str(error).strip()}") from error

    def query(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement finds, as they are committed."""
        with self._connection() as connection:
            found: list[Any] = connection.execute(statement, values).fetchall()
            return found

    @contextmanager
    def transaction(self, ids: Collection[str]) -> Iterator[Work]:
        """All or nothing, and no other writer of these ids meanwhile, here or on another server."""
        with self._connection() as connection, connection.cursor(binary=True) as cursor:
            keys = sorted({key_of(id) for id in ids} or {key_of("")})
            connection.execute("SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) AS key", [keys])

            def execute_many(statement: str, rows: list[Row]) -> None:
                cursor.executemany(statement, rows)

            yield Work(self.states, cursor.execute, execute_many)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            self._pool = None

    def before_fork(self) -> None:
        """Close all connections; a thread that is at work with one closes it when it is done."""
        self._lock.acquire()
        self.close()

    def after_fork(self) -> None:
        """Open again when needed."""
        self._lock.release()
