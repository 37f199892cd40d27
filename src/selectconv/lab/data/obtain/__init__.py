"""Find, fetch and unpack the files of data sets."""
