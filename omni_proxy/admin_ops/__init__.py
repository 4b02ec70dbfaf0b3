"""What admin operations mean: routes, worker selectors, the merge of many results. Pure."""
