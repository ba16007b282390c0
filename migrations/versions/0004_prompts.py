"""Prompts of recorded requests: block keys, and token ids where the policy keeps them."""

import sqlalchemy as sa
from alembic import op

revision = "0004_prompts"
down_revision = "0003_admission"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "prompts",
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("keys", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=True),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_prompts"),
    )
    op.create_index("ix_prompts_at_request_id", "prompts", ["at", "request_id"])


def downgrade() -> None:
    op.drop_table("prompts")
