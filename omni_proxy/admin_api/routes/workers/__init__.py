"""Routes that list, add, change, drain and remove workers."""
