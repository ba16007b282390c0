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
    "store_dropped_blocks": "Blocks not stored, since no agent answered or it had no room.",
    "store_failed_blocks": "Blocks copied that could not be published.",
    "agent_connects": "Handshakes with a node agent that succeeded.",
}
