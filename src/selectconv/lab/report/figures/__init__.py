"""The figures of a report, one file for each kind."""
