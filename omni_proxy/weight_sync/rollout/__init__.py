"""Rolling updates of a serving fleet: new weights from disk or the store, few workers at a time."""
