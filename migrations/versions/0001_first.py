"""Tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "0001_first"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _create_cluster()
    _create_policies()
    _create_history()
    _create_access()


def downgrade() -> None:
    for table in (
        "policies",
        "policy_revisions",
        "worker_commands",
        "workers",
        "nodes",
        "models",
        "gateways",
        "decisions",
        "leg_reports",
        "stat_points",
        "client_keys",
        "audit",
    ):
        op.drop_table(table)


def _create_cluster() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("joined_at", TIME, nullable=False),
        sa.Column("last_heartbeat_at", TIME, nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("node_id", sa.String(128), nullable=False),
        sa.Column("external", sa.Boolean(), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "worker_commands",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("worker_id", sa.String(128), nullable=False),
        sa.Column("node_id", sa.String(128), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_worker_commands"),
    )
    op.create_index("ix_worker_commands_node_id", "worker_commands", ["node_id"])
    op.create_table(
        "models",
        sa.Column("id", sa.String(256), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("max_model_len", sa.BigInteger(), nullable=True),
        sa.Column("kv_bytes_per_token", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
    )


def _create_policies() -> None:
    op.create_table(
        "policy_revisions",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("author", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("kind", "scope", "revision", name="pk_policy_revisions"),
    )
    op.create_table(
        "policies",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["kind", "scope", "revision"],
            ["policy_revisions.kind", "policy_revisions.scope", "policy_revisions.revision"],
            name="fk_policies_kind_scope_revision_policy_revisions",
        ),
        sa.PrimaryKeyConstraint("kind", "scope", name="pk_policies"),
    )


def _create_history() -> None:
    op.create_table(
        "decisions",
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("transfer_id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("prefill_worker", sa.String(128), nullable=False),
        sa.Column("decode_worker", sa.String(128), nullable=False),
        sa.Column("kv_counted", sa.Boolean(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_decisions"),
    )
    op.create_index("ix_decisions_at_request_id", "decisions", ["at", "request_id"])
    op.create_index("ix_decisions_status_at", "decisions", ["status", "at"])
    op.create_index("ix_decisions_transfer_id", "decisions", ["transfer_id"])
    op.create_table(
        "leg_reports",
        sa.Column("transfer_id", sa.String(128), nullable=False),
        sa.Column("worker_id", sa.String(128), nullable=False),
        sa.Column("kv_role", sa.String(16), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("transfer_id", "worker_id", "kv_role", name="pk_leg_reports"),
    )
    op.create_index("ix_leg_reports_at", "leg_reports", ["at"])
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("view_revision", sa.BigInteger(), nullable=False),
        sa.Column("last_report_at", TIME, nullable=False),
        sa.Column("stats", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gateways"),
    )
    op.create_table(
        "stat_points",
        sa.Column("resolution", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("source", sa.String(300), nullable=False),
        sa.Column("at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("resolution", "source", "at", name="pk_stat_points"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_stat_points_resolution_at", "stat_points", ["resolution", "at"])


def _create_access() -> None:
    op.create_table(
        "client_keys",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("key_sha256", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_client_keys"),
        sa.UniqueConstraint("key_sha256", name="uq_client_keys_key_sha256"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("verb", sa.String(64), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("result", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
