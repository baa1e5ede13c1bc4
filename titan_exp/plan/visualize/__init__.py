"""A layout as a page to look at: which rank holds what, the pipeline's and the memory's timeline, messages and time."""
