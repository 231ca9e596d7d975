"""Lightning as the owner of engines: its four packages, strategies, loops, paths and single files."""
