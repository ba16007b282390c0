"""The ledger says by which revision of which policy a request was turned away."""

import sqlalchemy as sa
from alembic import op

revision = "0006_ledger_policy"
down_revision = "0005_ledger_retry"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("ledger") as batch:
        batch.add_column(sa.Column("policy", sa.String(320), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("ledger") as batch:
        batch.drop_column("policy")
