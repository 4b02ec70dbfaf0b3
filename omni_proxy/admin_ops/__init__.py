"""Admin operations: their routes, worker selectors, and the merge of many results. Pure."""
