"""The node agent: one process a host that owns the slab and says who may use which slot."""
