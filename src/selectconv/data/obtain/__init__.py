"""Where data sets are found, fetched and unpacked."""
