"""Routes that call engines, mostly all of them: weights, pauses, aborts, merged reports."""
