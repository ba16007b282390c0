"""What the connector counts, by name; free of vLLM so that others may read it."""

# Name without Prometheus' "_total", help text.
COUNTERS = {
    "loaded_blocks": "Blocks read from the pool and verified.",
    "loaded_bytes": "Bytes of these blocks.",
    "load_failed_blocks": "Blocks promised by the pool that were lost, late or damaged.",
    "load_corrupt_blocks": "Blocks whose generation or checksum was wrong after the copy.",
    "load_scatter_seconds": "Time steps waited for copies from the pool.",
    "load_verify_seconds": "Time steps waited for verification.",
    "stored_blocks": "Blocks copied into the pool.",
    "stored_bytes": "Bytes of these blocks.",
    "store_seconds": "Time steps waited for copies into the pool.",
    "store_refused_blocks": "Blocks that the pool did not take at once, kept to be offered again.",
    "store_retried_blocks": "Of these, blocks that it took later.",
    "store_expired_blocks": "Of these, blocks that it did not take in time.",
    "store_dropped_blocks": "Blocks not stored, since no agent answered or there was no room to keep them.",
    "store_holes": "Chains that the pool has only the first part of, since it refused the rest.",
    "store_queue_alarms": "Times that the write queue or the kept blocks passed 70 % of their bound.",
    "store_failed_blocks": "Blocks copied that could not be published.",
    "promoted_blocks": "Blocks brought from SSD for a request that waited for them.",
    "promotions_skipped": "Promotions not asked for: to compute was quicker.",
    "promotions_given_up": "Promotions that took longer than to compute.",
    "short_prefix_blocks": "Blocks that a prefill leg had promised and the decode leg did not find.",
    "agent_connects": "Handshakes with a node agent that succeeded.",
}
