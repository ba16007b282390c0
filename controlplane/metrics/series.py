"""Every series of /metrics, once: name, kind, labels, unit, definition. docs/metrics.md repeats
this table and a test compares both with what /metrics gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class SeriesSpec:
    """`name` without the prefix `perilune_`; a counter's ends in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    definition: str

    @property
    def full_name(self) -> str:
        return f"perilune_{self.name}"


def _node(name: str, kind: Kind, unit: str, definition: str) -> SeriesSpec:
    return SeriesSpec(f"pool_{name}", kind, ("node",), unit, definition)


def _tier(name: str, kind: Kind, unit: str, definition: str) -> SeriesSpec:
    return SeriesSpec(f"pool_tier_{name}", kind, ("node", "tier"), unit, definition)


def _gateway(name: str, kind: Kind, unit: str, definition: str) -> SeriesSpec:
    return SeriesSpec(f"gateway_{name}", kind, ("gateway",), unit, definition)


CONTROLPLANE = (
    SeriesSpec("controlplane_uptime_seconds", "gauge", (), "seconds", "Time since this control plane started."),
    SeriesSpec("controlplane_rss_bytes", "gauge", (), "bytes", "Resident memory of the control plane."),
    SeriesSpec("controlplane_http_requests_total", "counter", ("method", "route", "status"), "requests", "Requests answered, by route template and class of status (2xx)."),
    SeriesSpec("controlplane_event_streams", "gauge", (), "streams", "Event streams open now."),
    SeriesSpec("controlplane_events_total", "counter", (), "events", "Events published and kept for resuming."),
    SeriesSpec("controlplane_event_resets_total", "counter", (), "events", "Streams told to read everything again because they fell behind."),
    SeriesSpec("controlplane_view_revision", "gauge", (), "revision", "Newest revision of the cluster view."),
    SeriesSpec("controlplane_decisions_stored_total", "counter", (), "records", "Decision records stored or completed."),
    SeriesSpec("controlplane_loop_errors_total", "counter", ("loop",), "errors", "Failed passes of a background loop."),
    SeriesSpec("controlplane_stat_sources_dropped_total", "counter", (), "samples", "Samples of sources beyond the bound, not counted."),
)  # fmt: skip

CLUSTER = (
    SeriesSpec("nodes", "gauge", ("state",), "nodes", "Nodes known, by state."),
    SeriesSpec("workers", "gauge", ("role", "state"), "workers", "Workers known, by role and state."),
    SeriesSpec("gateways", "gauge", ("state",), "gateways", "Gateways known, by state."),
    SeriesSpec("policy_revision", "gauge", ("kind", "scope"), "revision", "Active revision of each policy."),
    SeriesSpec("node_heartbeat_age_seconds", "gauge", ("node",), "seconds", "Age of the last heartbeat."),
    SeriesSpec("node_restarts_total", "counter", ("node",), "restarts", "Incarnations after the first."),
    SeriesSpec("worker_running", "gauge", ("worker",), "requests", "Requests in flight at the worker, as the gateways see it."),
    SeriesSpec("worker_waiting", "gauge", ("worker",), "requests", "Requests waiting for the worker in the gateways."),
    SeriesSpec("worker_restarts_total", "counter", ("worker",), "restarts", "Restarts of the worker by its supervisor."),
    SeriesSpec("worker_rss_bytes", "gauge", ("worker",), "bytes", "Resident memory of the worker's processes."),
)  # fmt: skip

POOL = (
    _node("uptime_seconds", "gauge", "seconds", "Time since the agent started."),
    _node("capacity_blocks", "gauge", "blocks", "Blocks that the slab holds."),
    _node("used_blocks", "gauge", "blocks", "Blocks held."),
    _node("pinned_blocks", "gauge", "blocks", "Blocks that may not be evicted now."),
    _node("pending_blocks", "gauge", "blocks", "Blocks being written."),
    _node("block_bytes", "gauge", "bytes", "Bytes of one block."),
    _node("slab_bytes", "gauge", "bytes", "Size of the slab."),
    _node("rss_bytes", "gauge", "bytes", "Resident memory of the agent without its slab."),
    _node("write_queue_blocks", "gauge", "blocks", "Blocks waiting to be written."),
    _node("write_queue_bound", "gauge", "blocks", "Bound of the write queue."),
    _node("owners", "gauge", "owners", "Owners of pins."),
    _node("lookups_total", "counter", "lookups", "Prefix lookups."),
    _node("lookup_blocks_total", "counter", "blocks", "Blocks looked up."),
    _node("lookup_hit_blocks_total", "counter", "blocks", "Blocks looked up and held."),
    _node("prompt_tokens_total", "counter", "tokens", "Prompt tokens of finished prefill legs."),
    _node("hit_tokens_total", "counter", "tokens", "Of these, tokens served by device cache or pool."),
    _node("stored_blocks_total", "counter", "blocks", "Blocks stored."),
    _node("store_failed_total", "counter", "blocks", "Blocks whose write failed."),
    _node("store_refused_total", "counter", "blocks", "Blocks for which there was no room."),
    _node("loaded_blocks_total", "counter", "blocks", "Blocks loaded."),
    _node("load_failed_total", "counter", "blocks", "Blocks whose read failed; they were recomputed."),
    _node("evict_attempts_total", "counter", "attempts", "Times that blocks were asked to leave: for stores, quotas, lowered limits, room on SSD, and ahead of need."),
    _node("starved_by_pins_total", "counter", "attempts", "Evictions that found only pinned blocks."),
    _node("corrupt_total", "counter", "blocks", "Reads that failed verification."),
    _node("leases_expired_total", "counter", "leases", "Leases that ran out instead of being released."),
    _node("moved_bytes_total", "counter", "bytes", "Bytes that the node pulled from or pushed to other nodes, over any transport; what workers hand over within its slab is not moved."),
    _node("evicted_wanted_again_total", "counter", "blocks", "Blocks wanted soon after their eviction."),
    SeriesSpec("pool_evicted_blocks_total", "counter", ("node", "cause"), "blocks", "Blocks that left the pool, by cause."),
    SeriesSpec("pool_shm_bytes_total", "counter", ("node", "pair"), "bytes", "Bytes stored by the first worker and loaded by the second, through shared memory."),
    SeriesSpec("pool_shm_seconds_total", "counter", ("node", "pair"), "seconds", "Time that these loads took."),
)  # fmt: skip

TIER = (
    _tier("up", "gauge", "bool", "1 while the tier serves; 0 while it is full, rebuilding, off or stopped."),
    _tier("capacity_bytes", "gauge", "bytes", "Bytes of blocks that the tier may hold."),
    _tier("used_bytes", "gauge", "bytes", "Bytes of blocks that it holds; a block in both tiers counts in both."),
    _tier("free_device_bytes", "gauge", "bytes", "Bytes really free on the device under the tier."),
    _tier("read_blocks_total", "counter", "blocks", "Blocks read from the tier."),
    _tier("read_bytes_total", "counter", "bytes", "Bytes of these blocks."),
    _tier("read_seconds_total", "counter", "seconds", "Time that these reads took."),
    _tier("written_blocks_total", "counter", "blocks", "Blocks written to the tier; to SSD: copies, also of blocks that then stayed."),
    _tier("written_bytes_total", "counter", "bytes", "Bytes of these blocks."),
    _tier("write_seconds_total", "counter", "seconds", "Time that these writes took."),
    _tier("evicted_blocks_total", "counter", "blocks", "Blocks that left the tier for room."),
    _tier("failed_reads_total", "counter", "blocks", "Reads that failed or did not verify."),
    _tier("failed_writes_total", "counter", "blocks", "Writes that failed."),
)  # fmt: skip

EVICTION = (
    _node("evict_successes_total", "counter", "attempts", "Of these, those that got all the blocks they asked for."),
    _node("demoted_blocks_total", "counter", "blocks", "Blocks that left memory with a copy on SSD."),
    _node("promoted_blocks_total", "counter", "blocks", "Blocks that came back from SSD into memory."),
    _node("dropped_undemoted_blocks_total", "counter", "blocks", "Blocks that left the pool for room before a copy was on SSD."),
    _node("pinned_bytes", "gauge", "bytes", "Bytes kept from eviction by pins."),
    _node("leased_bytes", "gauge", "bytes", "Of these, by owners whose lease has not been renewed since."),
    _node("eviction_history_entries", "gauge", "blocks", "Evicted blocks still remembered."),
    _node("eviction_policy_revision", "gauge", "revision", "Revision of the cache policy that the agent acts on."),
    SeriesSpec("pool_eviction_policy", "gauge", ("node", "policy"), "bool", "1 for the eviction policy in use."),
    SeriesSpec("pool_eviction_age_seconds", "gauge", ("node", "quantile"), "seconds", "Age of victims since their last use."),
    SeriesSpec("pool_group_used_bytes", "gauge", ("kind", "group"), "bytes", "Bytes that a tenant or namespace holds on all nodes and tiers; beyond the 50 largest: other."),
    SeriesSpec("pool_group_quota_bytes", "gauge", ("kind", "group"), "bytes", "Its quotas, summed over the nodes; no sample without one."),
    SeriesSpec("pool_what_if_hit_ratio", "gauge", ("capacity_factor",), "ratio", "Predicted hit rate of the live key stream at so many times the capacity."),
    SeriesSpec("pool_claims_checked_total", "counter", ("node",), "blocks", "Claims of the prefix index that the auditor compared with the node's truth."),
    SeriesSpec("pool_claims_stale_total", "counter", ("node",), "blocks", "Of these, claims of blocks that the node did not hold."),
    SeriesSpec("jobs", "gauge", ("kind", "state"), "jobs", "Operators' jobs that have not ended."),
)  # fmt: skip

INDEX = (
    SeriesSpec("index_blocks", "gauge", (), "blocks", "Blocks in the control plane's own index, however many nodes hold each."),
    SeriesSpec("index_entries", "gauge", (), "entries", "Claims in it that a node holds a block."),
    SeriesSpec("index_dropped_total", "counter", (), "blocks", "Blocks forgotten because the index was at its bound."),
    SeriesSpec("index_following", "gauge", ("node",), "bool", "1 while the node's events arrive and none is missing."),
    SeriesSpec("index_resyncs_total", "counter", ("node",), "resyncs", "Times that the node's claims were read anew because of wrong ones, or on demand."),
    SeriesSpec("index_checks_total", "counter", ("node", "tier"), "claims", "Claims compared with the node, by the tier claimed."),
    SeriesSpec("index_stale_total", "counter", ("node", "tier"), "claims", "Of these, claims that the node denied twice."),
    SeriesSpec("index_stale_rate", "gauge", ("node", "tier"), "share", "Share of stale claims among the last 1,000 checked."),
    SeriesSpec("directory_state", "gauge", ("state",), "bool", "1 for the state of the directory: none, rebuilding, current, lost or read_only."),
    SeriesSpec("directory_nodes", "gauge", (), "nodes", "Nodes registered in the directory."),
)  # fmt: skip

_PAIR = ("source", "destination", "transport", "priority")
_LINK = ("node", "peer", "transport")
_PORT = ("node", "port")
TRANSFER = (
    SeriesSpec("transfers_total", "counter", _PAIR, "transfers", "Transfers between two nodes that ended."),
    SeriesSpec("transfer_bytes_total", "counter", _PAIR, "bytes", "Bytes that they moved and verified; the doctor's probes are among them, in the class batch."),
    SeriesSpec("transfer_pieces_total", "counter", _PAIR, "pieces", "Blocks or parts of blocks that arrived whole."),
    SeriesSpec("transfer_retries_total", "counter", _PAIR, "retries", "Tries of a piece after its first."),
    SeriesSpec("transfers_in_flight", "gauge", _PAIR, "transfers", "Transfers under way."),
    SeriesSpec("transfer_missing_total", "counter", (*_PAIR, "cause"), "pieces", "Pieces that did not come, by cause; their blocks were computed instead."),
    SeriesSpec("transfer_seconds_total", "counter", (*_PAIR, "stage"), "seconds", "Time of these transfers by stage: queue_wait, setup, wire, verify, total."),
    SeriesSpec("transfer_link_healthy", "gauge", _LINK, "bool", "1 while the path's breaker is closed."),
    SeriesSpec("transfer_link_window_ops", "gauge", _LINK, "ops", "Effective queue depth of the path."),
    SeriesSpec("transfer_link_resent_bytes_total", "counter", _LINK, "bytes", "Bytes sent again on the path."),
    SeriesSpec("transfer_link_bandwidth", "gauge", _LINK, "B/s", "Bandwidth as the choice of a transport measures it; no sample before the first large transfer."),
    SeriesSpec("transfer_alarms", "gauge", ("node",), "alarms", "Paths of the node that carry nothing now."),
    SeriesSpec("rdma_port_active", "gauge", _PORT, "bool", "1 while the port is ACTIVE."),
    SeriesSpec("rdma_queue_pairs", "gauge", _PORT, "queue pairs", "Queue pairs of the port that are open."),
    SeriesSpec("rdma_queue_depth", "gauge", _PORT, "work requests", "Effective depth of a queue pair's send queue."),
    SeriesSpec("rdma_read_bytes_total", "counter", _PORT, "bytes", "Bytes that were read from peers over the port."),
    SeriesSpec("rdma_written_bytes_total", "counter", _PORT, "bytes", "Bytes that were written into peers' slots over the port."),
    SeriesSpec("rdma_off_rail_bytes_total", "counter", _PORT, "bytes", "Of these, bytes to or from a port on another rail."),
    SeriesSpec("rdma_off_numa_bytes_total", "counter", _PORT, "bytes", "Of these, bytes of slots that lie at another memory node than the port."),
    SeriesSpec("rdma_work_requests_total", "counter", _PORT, "work requests", "Work requests that the device took."),
    SeriesSpec("rdma_errors_total", "counter", _PORT, "errors", "Queue pairs that broke under traffic."),
    SeriesSpec("rdma_receiver_not_ready_total", "counter", _PORT, "answers", "Times that a receiver was not ready and was waited for, as the device counts them since the agent opened it."),
    SeriesSpec("rdma_retries_total", "counter", _PORT, "retries", "Packets lost, late or out of order, as the device counts them since the agent opened it."),
)  # fmt: skip

GATEWAY = (
    _gateway("requests_total", "counter", "requests", "Requests of /v1, whatever came of them."),
    _gateway("rejected_total", "counter", "requests", "Requests rejected by admission (429)."),
    _gateway("failed_total", "counter", "requests", "Requests that failed on our side."),
    _gateway("cancelled_total", "counter", "requests", "Requests whose client went away."),
    _gateway("client_errors_total", "counter", "requests", "Requests that were wrong (4xx)."),
    _gateway("in_flight", "gauge", "requests", "Requests being served now."),
    _gateway("prompt_tokens_total", "counter", "tokens", "Prompt tokens, as tokenised for routing."),
    _gateway("hit_tokens_total", "counter", "tokens", "Prompt tokens served from a cache, as the prefill legs reported."),
    _gateway("output_tokens_total", "counter", "tokens", "Tokens generated."),
    _gateway("tokenizer_mismatch_total", "counter", "requests", "Prompts that the engine counted otherwise than we did."),
    _gateway("slo_met_total", "counter", "requests", "Requests that met the SLO."),
    _gateway("slo_missed_total", "counter", "requests", "Requests that did not."),
    _gateway("shed_total", "counter", "requests", "Of the rejected, those that had waited for their turn at prefill."),
    _gateway("probes_total", "counter", "requests", "Requests that admission would have rejected, let in to learn, and ended."),
    _gateway("probes_met_total", "counter", "requests", "Of these, those that met the SLO: they would have been rejected falsely."),
    SeriesSpec("gateway_false_reject_ratio", "gauge", ("gateway",), "ratio", "Share of probes that met the SLO; no sample before the first probe."),
    _gateway("decisions_dropped_total", "counter", "records", "Decision records lost because their queue was full."),
    _gateway("index_blocks", "gauge", "blocks", "Blocks in the prefix index."),
    _gateway("rss_bytes", "gauge", "bytes", "Resident memory of the gateway."),
    _gateway("time_to_first_token_seconds", "histogram", "seconds", "TTFT: from the request's arrival to its first output byte."),
    _gateway("inter_token_latency_seconds", "histogram", "seconds", "TBT: time between two tokens of a stream."),
    _gateway("queue_seconds", "histogram", "seconds", "Time from arrival to the prefill leg's start."),
    SeriesSpec("gateway_worker_requests_total", "counter", ("gateway", "worker"), "requests", "Legs sent to the worker."),
    SeriesSpec("gateway_worker_failures_total", "counter", ("gateway", "worker"), "requests", "Legs that failed there."),
    SeriesSpec("gateway_worker_queued_tokens", "gauge", ("gateway", "worker"), "tokens", "Prompt tokens sent there and not yet prefilled."),
)  # fmt: skip

ALL: tuple[SeriesSpec, ...] = (
    *CONTROLPLANE,
    *CLUSTER,
    *POOL,
    *TIER,
    *EVICTION,
    *INDEX,
    *TRANSFER,
    *GATEWAY,
)
BY_NAME = {spec.name: spec for spec in ALL}
