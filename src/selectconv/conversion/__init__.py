"""Any CNN in one call: which convs become selective, and where their E[X] comes from."""
