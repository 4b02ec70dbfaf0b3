"""`omni-proxy top`: the fleet live, on the whole terminal.

view.py has the state of the screen and handles keys, frame.py renders it, follower.py reads the
feed in its own thread, command.py owns the terminal and reads its keys.
"""
