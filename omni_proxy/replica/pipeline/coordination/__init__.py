"""The coordinator: request flow, delivery to readers, operations on stages."""
