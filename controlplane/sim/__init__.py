"""Discrete-event runs of the cores: the clock is a number, nothing here does I/O."""
