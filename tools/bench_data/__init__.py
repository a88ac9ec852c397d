"""The data engine measured: speed beside datatrove on the same documents, memory, and near duplicates planted by hand."""
