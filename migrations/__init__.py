"""Alembic migrations of the control plane's database: one set for SQLite and Postgres."""
