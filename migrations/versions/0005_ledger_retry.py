"""The ledger says what Retry-After a rejected request was given."""

import sqlalchemy as sa
from alembic import op

revision = "0005_ledger_retry"
down_revision = "0004_prompts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("ledger") as batch:
        batch.add_column(sa.Column("retry_after_seconds", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("ledger") as batch:
        batch.drop_column("retry_after_seconds")
