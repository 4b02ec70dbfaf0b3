"""Zero-downtime upgrade: a new program takes over the sockets and the state of the running one.

The running program starts the new one (`outgoing`), hands over its listening sockets and its state,
and drains when the new one is ready (`incoming`). Until then a failure of the new one changes
nothing. docs/upgrade.md has the steps and the format of the state.
"""
