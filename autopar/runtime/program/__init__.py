"""The files of an emitted program as its ranks read them: manifest, tables, layouts, batches, transfers."""
