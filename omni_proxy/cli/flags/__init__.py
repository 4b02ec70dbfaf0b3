"""Command lines: flags, flags of other routers, commands of engines."""
