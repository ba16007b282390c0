"""Benches of the control plane's side."""
