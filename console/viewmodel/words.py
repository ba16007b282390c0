"""What `?` says of the words and marks on the screens, the same in terminal, web and docs."""

from __future__ import annotations

WORDS = (
    ("hit rate", "prompt tokens served from any tier / prompt tokens requested; local: from this node only"),
    ("cache", "bytes of blocks in DRAM slabs / their capacity; SSD is shown apart"),
    ("evictions", "blocks removed by an eviction policy; purges are not counted"),
    ("wanted again", "evicted blocks that were asked for again soon after (within 5 min) / evicted blocks"),
    ("starved", "evictions that found only pinned blocks: then nothing can be stored"),
    ("lapsing", "bytes kept from eviction by pins whose owner has not renewed its lease"),
    ("demoted, promoted", "blocks that moved from DRAM to SSD, and came back from SSD into DRAM"),
    ("stale claims", "blocks that the prefix index says a node holds and that it does not / claims checked"),
    ("what-if", "hit rate of what the pool is asked for, predicted from the keys of requests at other capacities"),
    ("missing", "pieces of a transfer between nodes that did not come; their blocks are computed instead"),
    ("setup, wire, verify", "a transfer's time: connecting and agreeing; bytes on their way; checksums"),
    ("first token, batch", "classes of transfers: what a first token waits for goes before what is in bulk"),
    ("link", "the path of one node to another by one transport; its measured cost is latency + bytes / bandwidth"),
    ("disaggregation needs", "bandwidth at which moving a prompt's KV takes no longer than computing it"),
    ("write queue", "blocks waiting to be stored / bound; alarm at 70 %"),
    ("moved", "KV bytes between nodes, counted at the receiver; shared memory on one node is not moved"),
    ("TTFT", "request read by the gateway until the first token's first byte is sent; streamed requests only"),
    ("TBT", "time between two streamed tokens of one request (inter_token_latency_seconds)"),
    ("queue", "waiting at prefill"),
    ("transfer", "fetching a prefix for prefill"),
    ("prefill", "computing the prompt's tokens that were not cached"),
    ("handover", "prefill's end until decode holds all blocks"),
    ("KV wait", "decode time a request stood still for blocks / its decode time"),
    ("rejected", "429 by admission / requests; client errors and failures are apart"),
)  # fmt: skip
"""Word and meaning."""

MARKS = (
    ("numbers", "0 zero, <0.1 % small, -- unknown, - nothing to measure (no traffic), n/a not offered"),
    ("cells", "/ no data, - no traffic, ~ stale, ! breach, < still filling, blank = did not exist"),
    ("events", "under a time axis: P policy R restart D drain J joined L lost, 2-9 several"),
)  # fmt: skip
"""What signs mean where a value would stand."""

HELP = WORDS + MARKS
