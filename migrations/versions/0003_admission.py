"""Admission: longer policy scopes, what a client key may claim, the ledger of rejections."""

import sqlalchemy as sa
from alembic import op

revision = "0003_admission"
down_revision = "0002_jobs"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _scopes(64, 128)
    with op.batch_alter_table("client_keys") as batch:
        batch.add_column(
            sa.Column("max_priority", sa.String(32), nullable=False, server_default="")
        )
    op.create_table(
        "ledger",
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("gate", sa.String(16), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("priority", sa.String(32), nullable=False),
        sa.Column("predicted_seconds", sa.Double(), nullable=False),
        sa.Column("limit_seconds", sa.Double(), nullable=False),
        sa.Column("measured_seconds", sa.Double(), nullable=True),
        sa.Column("met", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_ledger"),
    )
    op.create_index("ix_ledger_at_request_id", "ledger", ["at", "request_id"])


def downgrade() -> None:
    op.drop_table("ledger")
    with op.batch_alter_table("client_keys") as batch:
        batch.drop_column("max_priority")
    _scopes(128, 64)


def _scopes(old: int, new: int) -> None:
    for table in ("policy_revisions", "policies"):
        with op.batch_alter_table(table) as batch:
            batch.alter_column(
                "scope",
                existing_type=sa.String(old),
                type_=sa.String(new),
                existing_nullable=False,
            )
