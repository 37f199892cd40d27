"""Read the files of each data set as images and labels."""
