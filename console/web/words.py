"""What `?` says of the words on the pages."""

WORDS = (
    ("hit rate", "prompt tokens served from any tier / prompt tokens requested; local: from this node only"),
    ("cache size", "bytes of blocks in DRAM slabs / their capacity"),
    ("evictions", "blocks removed by an eviction policy; purges are not counted"),
    ("write queue", "blocks waiting to be stored / bound"),
    ("moved", "KV bytes between nodes, counted at the receiver; shared memory on one node is not moved"),
    ("TTFT", "request read by the gateway until the first token's first byte is sent"),
    ("TBT", "time between two streamed tokens of one request (inter_token_latency_seconds)"),
    ("queue, transfer, prefill, handover", "waiting at prefill; fetching a prefix for prefill; computing; prefill's end until decode holds all blocks"),
    ("KV wait", "decode time a request stood still for blocks / its decode time"),
    ("rejected", "429 by admission / requests; client errors and failures are apart"),
    ("0, <0.1 %, --, -, n/a", "zero; small; unknown; no traffic; not offered by this engine"),
)  # fmt: skip
"""Word and meaning, the same as in the terminal."""
