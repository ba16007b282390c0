"""Alembic's entry. `controlplane.db.migrate` hands over an open connection and its transaction."""

from alembic import context
from sqlalchemy import Connection

from controlplane.db.tables import Base


def run(connection: Connection) -> None:
    """Run the migrations in the caller's transaction."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        compare_type=True,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is None:
    raise SystemExit("start the control plane: it migrates by itself (controlplane.db.migrate)")
run(given)
