"""Every table in one place, so that `Base.metadata` is complete for Alembic."""

from controlplane.audit.tables import AuditRecord
from controlplane.db.base import Base
from controlplane.decisions.tables import DecisionRow, LegRow
from controlplane.fleet.tables import CommandRow, WorkerRow
from controlplane.gateways.tables import GatewayRow
from controlplane.jobs.tables import JobRow
from controlplane.ledger.tables import LedgerRow
from controlplane.models.tables import ModelRow
from controlplane.nodes.tables import NodeRow
from controlplane.policies.tables import ActiveRow, RevisionRow
from controlplane.prompts.tables import PromptRow
from controlplane.stats.tables import StatRow
from controlplane.tokens.tables import KeyRow

__all__ = [
    "ActiveRow",
    "AuditRecord",
    "Base",
    "CommandRow",
    "DecisionRow",
    "GatewayRow",
    "JobRow",
    "KeyRow",
    "LedgerRow",
    "LegRow",
    "ModelRow",
    "NodeRow",
    "PromptRow",
    "RevisionRow",
    "StatRow",
    "WorkerRow",
]
