"""What a person begins with: the files of an environment, an agent or a data set of their own."""
