"""What a command line means: the flags, those of other routers, engines, and completion scripts."""
