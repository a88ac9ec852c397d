"""Embedded exercises: generated conversations whose answers can be checked exactly."""
