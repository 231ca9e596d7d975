"""The checkpoint tools, a module each, and what several of them share."""
