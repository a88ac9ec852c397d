"""The n-th I/O error: what reads and writes is run again and again, and one call of the C library fails each time."""
