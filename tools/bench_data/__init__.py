"""The data engine measured: speed beside datatrove on the same documents, memory, planted near duplicates."""
