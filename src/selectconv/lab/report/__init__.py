"""Tables, figures and one self-contained page from the files of runs."""
