"""Starting the ranks of a run, and telling a rank who it is."""
