"""The laboratory: networks, data, training, tables and figures; the library does not know it."""
