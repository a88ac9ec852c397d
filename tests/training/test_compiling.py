"""Compiled and checkpointed blocks against plain ones; every attention kernel against the math one. 60 s on one core."""
