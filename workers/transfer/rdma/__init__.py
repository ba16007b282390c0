"""Blocks over RDMA verbs: reliable connections, one-sided reads, writes for pushes.

`node.RdmaNode` opens devices and registers the slab once; `transport.RdmaTransport` pulls and
pushes, `server.RdmaServer` lets peers in. pyverbs is imported when a device is opened, not before.
"""
