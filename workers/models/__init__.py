"""Model preparation: from a name that an operator types to a folder that an engine can load."""
