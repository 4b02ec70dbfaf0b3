"""Receivers and senders in child processes: the fork server, its client, and their IPC.

`forkserver_client` starts `forkserver`, which has torch imported and forks `receiver_process` for
each group. `child_process` is the parent's handle of a fork; `ipc` is the protocol between them;
`subprocess_receiver` and `subprocess_sender` implement `Receiver` and `Sender` over it.
"""
